#!/bin/bash
# container_boot.sh ROOM BUILD USER VOLUME COMMAND...: runs COMMAND as PID 1 of a container made of namespaces. Needs root.
#
# Its file system is an overlay of this machine's files, in which BUILD (a script) is run first. Then the file system
# becomes read-only, except for VOLUME and /tmp. SHARED: directories of this machine that it sees, too.
# VOLUME_OPTIONS: of the mount; by default it has the owner and the mode of its directory.
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin
export ROOM=$1
shift
exec unshare --pid --fork --kill-child --mount --propagation private bash -euc '
  build=$1 user=$2 volume=$3
  shift 3
  mount -t tmpfs -o mode=755 tmpfs "$ROOM"
  mkdir "$ROOM/up" "$ROOM/work" "$ROOM/root"
  mount -t overlay overlay -o "lowerdir=/,upperdir=$ROOM/up,workdir=$ROOM/work" "$ROOM/root"
  root=$ROOM/root
  mount -t proc proc "$root/proc"
  mount --rbind /dev "$root/dev"
  mount --rbind /sys "$root/sys"
  mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
  for shared in $SHARED; do
    mkdir -p "$root$shared"
    mount --rbind "$shared" "$root$shared"
    # In the overlay and in new directories only: the user may not be allowed to enter the original ones.
    above=$(dirname "$shared")
    while [ "$above" != / ]; do chmod a+x "$root$above"; above=$(dirname "$above"); done
  done
  printf "%s" "$build" | chroot "$root" bash -euo pipefail
  kept=$(stat -c "mode=%a,uid=%u,gid=%g" "$root$volume")
  mount -t tmpfs -o "${VOLUME_OPTIONS:-$kept}" tmpfs "$root$volume"
  mount -o remount,ro "$root"
  # The signal ends it with unshare; a change of the user would clear it.
  exec chroot "$root" setpriv --reuid "${user%%:*}" --regid "${user##*:}" --clear-groups --pdeathsig KILL -- "$@"
' container "$@"
