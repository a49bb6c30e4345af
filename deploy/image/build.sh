#!/usr/bin/env bash
# Builds an image out of wheels/: kvferry:cpu, kvferry:cuda, kvferry:demo, kvferry-front:cpu (argument front), or on BASE
# kvferry-vllm:cuda (argument vllm): with docker where an engine answers, else with buildah (--isolation chroot: no daemon, no user namespace) on a base that debootstrap makes of
# this system's own Debian mirror (MIRROR: another). Prints its size, and its digest, by which deploy/ may name it.
set -euo pipefail
cd "$(dirname "$0")/../.."
variant=${1:-cpu}
suite=bookworm
name=kvferry:$variant
what=(-f Dockerfile --target daemon --build-arg "VARIANT=$variant")
case "$variant" in
  front)
    name=kvferry-front:cpu
    what[3]=front
    ;;
  vllm)
    name=kvferry-vllm:cuda
    [ -n "${BASE:-}" ] || { echo "BASE must name an image with vLLM in it" >&2; exit 2; }
    what=(-f deploy/image/vllm.Dockerfile)
    ;;
esac
if docker info >/dev/null 2>&1 && [ -z "${USE_BUILDAH:-}" ]; then
  DOCKER_BUILDKIT=1 docker build ${BASE:+--build-arg "BASE=$BASE"} "${what[@]}" -t "$name" .
  docker image inspect -f "$name {{.Size}} bytes, {{.Id}}" "$name"
  exit
fi
for tool in buildah debootstrap; do
  command -v "$tool" >/dev/null || { echo "no docker engine answers, and $tool is not here: apt-get install buildah debootstrap" >&2; exit 1; }
done
mirror() { # where this system has Debian's packages from
  apt-get indextargets --format '$(ORIGIN) $(REPO_URI)' 'Created-By: Packages' 2>/dev/null |
    sed -n 's/^Debian \(.*[^/]\)\/*$/\1/p' | grep -v security | head -n 1
}
store=${IMAGE_STORE:-$PWD/build/images}
mkdir -p "$store"
buildah=(buildah --root "$store/root" --runroot "$store/run" --storage-driver vfs)
base=${BASE:-localhost/$suite-minbase}
if [ "$base" = "localhost/$suite-minbase" ] && ! "${buildah[@]}" inspect --type image "$base" >/dev/null 2>&1; then
  if [ ! -e "$store/base/etc/debian_version" ]; then
    from=${MIRROR:-$(mirror)}
    [ -n "$from" ] || { echo "this system's apt names no mirror of Debian: MIRROR=URL" >&2; exit 1; }
    rm -rf "$store/base"
    debootstrap --variant=minbase "$suite" "$store/base" "$from" >"$store/debootstrap.log" || { tail "$store/debootstrap.log" >&2; exit 1; }
    rm -rf "$store"/base/var/cache/apt/* "$store"/base/var/lib/apt/lists/*
  fi
  empty=$("${buildah[@]}" from scratch)
  "${buildah[@]}" add -q "$empty" "$store/base" / >/dev/null
  "${buildah[@]}" config --cmd bash "$empty"
  "${buildah[@]}" commit -q --rm "$empty" "$base" >/dev/null
fi
"${buildah[@]}" build --isolation chroot --layers=false --pull-never --build-arg "BASE=$base" "${what[@]}" \
  --format docker -t "localhost/$name" .
# Its root file system, for tests and for those who run it without an engine.
rootfs=$store/rootfs-$variant
rm -rf "$rootfs"
made=$("${buildah[@]}" from --pull-never "localhost/$name")
mkdir "$rootfs"
tar -C "$("${buildah[@]}" mount "$made")" -cf - . | tar -C "$rootfs" -xf -
"${buildah[@]}" rm "$made" >/dev/null
"${buildah[@]}" images --digests "localhost/$name"
echo "root file system: $rootfs, $(du -s --block-size=1M "$rootfs" | cut -f1) MiB"
