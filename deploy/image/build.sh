#!/usr/bin/env bash
# Builds the image kvferry:VARIANT (cpu or cuda) out of wheels/: with docker where an engine answers, else with buildah
# (--isolation chroot: no daemon, no user namespace) on a base that debootstrap makes. Prints its size.
set -euo pipefail
cd "$(dirname "$0")/../.."
variant=${1:-cpu}
suite=bookworm
mirror=${MIRROR:-http://deb.debian.org/debian}
if docker info >/dev/null 2>&1 && [ -z "${USE_BUILDAH:-}" ]; then
  DOCKER_BUILDKIT=1 docker build ${BASE:+--build-arg "BASE=$BASE"} --build-arg "VARIANT=$variant" -t "kvferry:$variant" .
  docker image inspect -f "kvferry:$variant {{.Size}} bytes" "kvferry:$variant"
  exit
fi
for tool in buildah debootstrap; do
  command -v "$tool" >/dev/null || { echo "no docker engine answers, and $tool is not here: apt-get install buildah debootstrap" >&2; exit 1; }
done
store=${IMAGE_STORE:-$PWD/build/images}
mkdir -p "$store"
buildah=(buildah --root "$store/root" --runroot "$store/run" --storage-driver vfs)
base=${BASE:-localhost/$suite-minbase}
if [ "$base" = "localhost/$suite-minbase" ] && ! "${buildah[@]}" inspect --type image "$base" >/dev/null 2>&1; then
  if [ ! -e "$store/base/etc/debian_version" ]; then
    rm -rf "$store/base"
    debootstrap --variant=minbase "$suite" "$store/base" "$mirror" >"$store/debootstrap.log" || { tail "$store/debootstrap.log" >&2; exit 1; }
    rm -rf "$store"/base/var/cache/apt/* "$store"/base/var/lib/apt/lists/*
  fi
  empty=$("${buildah[@]}" from scratch)
  "${buildah[@]}" add -q "$empty" "$store/base" / >/dev/null
  "${buildah[@]}" config --cmd bash "$empty"
  "${buildah[@]}" commit -q --rm "$empty" "$base" >/dev/null
fi
"${buildah[@]}" build --isolation chroot --layers=false --pull-never --build-arg "BASE=$base" --build-arg "VARIANT=$variant" \
  --format docker -t "localhost/kvferry:$variant" .
# Its root file system, for tests and for those who run it without an engine.
rootfs=$store/rootfs-$variant
rm -rf "$rootfs"
made=$("${buildah[@]}" from --pull-never "localhost/kvferry:$variant")
mkdir "$rootfs"
tar -C "$("${buildah[@]}" mount "$made")" -cf - . | tar -C "$rootfs" -xf -
"${buildah[@]}" rm "$made" >/dev/null
"${buildah[@]}" images "localhost/kvferry:$variant"
echo "root file system: $rootfs, $(du -s --block-size=1M "$rootfs" | cut -f1) MiB"
