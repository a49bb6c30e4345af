#!/usr/bin/env bash
# Runs a command in the image's root file system as a container engine would: read-only, uid 65532, the image's environment,
# memory-backed /dev/shm, /tmp and /run/kvferry. To be called in mount and PID namespaces of its own:
#   unshare --mount --pid --fork --kill-child deploy/image/run-rootfs.sh ROOTFS kvferry serve ...
set -euo pipefail
root=$1
shift
mount --bind "$root" "$root"
mount -o remount,ro,bind,nosuid "$root"
mount -t proc proc "$root/proc"
mount -t sysfs -o ro sysfs "$root/sys" # UCX finds its network devices there
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
for device in null zero random urandom; do
  : >"$root/dev/$device"
  mount --bind "/dev/$device" "$root/dev/$device"
done
mkdir "$root/dev/shm"
mount -t tmpfs -o "size=${SHM_SIZE:-1g},mode=1777" tmpfs "$root/dev/shm"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
mount -t tmpfs -o uid=65532,gid=65532,mode=700 tmpfs "$root/run/kvferry"
exec "$(dirname "$0")/enter-rootfs.sh" "$root" "$@"
