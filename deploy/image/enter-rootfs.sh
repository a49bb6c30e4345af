#!/usr/bin/env bash
# Runs one more command in a root file system that run-rootfs.sh has mounted (in its namespaces: nsenter).
root=$1
shift
exec /usr/bin/env -i HOME=/home/kvferry PATH=/opt/kvferry/bin:/usr/bin:/bin PYTHONPATH=/opt/kvferry \
  PYTHONDONTWRITEBYTECODE=1 XDG_RUNTIME_DIR=/run/kvferry \
  /usr/sbin/chroot --userspec=65532:65532 "$root" "$@"
