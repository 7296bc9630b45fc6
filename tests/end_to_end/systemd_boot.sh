#!/bin/bash
# systemd_boot.sh CGROUP DIRECTORY PYTHON: a real systemd as PID 1 of private namespaces, in the foreground. Needs root.
#
# What it sees is an overlay of this machine's files: whatever it writes goes to a tmpfs that ends with it.
# DIRECTORY/stage is copied over it; PYTHON (an installation) is shown read-only at /opt/python. It knows the units in
# stage/run/units and no others: the distribution's would empty temporary directories and start services. Everything is
# in CGROUP: to kill that ends it.
set -euo pipefail
# A shell of root may leave out where root's tools are.
PATH=$PATH:/usr/sbin:/sbin
CGROUP=$1
export STAGE=$2/stage ROOM=$2/room PYTHON=$3
mkdir "$ROOM"
echo $$ > "$CGROUP/cgroup.procs"
exec unshare --pid --fork --kill-child --mount --cgroup --uts --ipc --propagation private bash -euc '
  mount -t tmpfs -o mode=755 tmpfs "$ROOM"
  mkdir "$ROOM/up" "$ROOM/work" "$ROOM/root"
  mount -t overlay overlay -o "lowerdir=/,upperdir=$ROOM/up,workdir=$ROOM/work" "$ROOM/root"
  root=$ROOM/root
  # Of a forq on this machine.
  rm -rf "$root/var/lib/forq" "$root/etc/forq"
  mount -t proc proc "$root/proc"
  mount --bind "$root/proc/sys" "$root/proc/sys"
  mount -o remount,bind,ro "$root/proc/sys"
  mount -t sysfs -o ro sysfs "$root/sys"
  mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
  mount -t tmpfs -o mode=755 tmpfs "$root/dev"
  mkdir "$root/dev/shm" "$root/dev/pts"
  for node in null:1:3 zero:1:5 full:1:7 random:1:8 urandom:1:9 tty:5:0; do
    IFS=: read -r name major minor <<< "$node"
    mknod -m 666 "$root/dev/$name" c "$major" "$minor"
  done
  mount -t devpts -o newinstance,ptmxmode=666 devpts "$root/dev/pts"
  ln -s pts/ptmx "$root/dev/ptmx"
  touch "$root/dev/console"
  mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
  mount -t tmpfs -o mode=755 tmpfs "$root/run"
  mkdir -p "$root/run/lock" "$root/opt/python" "$root/mnt/old"
  mount --bind "$PYTHON" "$root/opt/python"
  mount -o remount,bind,ro "$root/opt/python"
  cp -r --no-preserve=ownership "$STAGE/." "$root/"
  for target in sysinit basic sockets shutdown umount final; do
    printf "[Unit]\nDescription=%s\nDefaultDependencies=no\n" "$target" > "$root/run/units/$target.target"
  done
  cd "$root"
  pivot_root . mnt/old
  umount -l /mnt/old
  mount --make-rshared /
  hostname forq-test
  exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin container=forq-test SYSTEMD_UNIT_PATH=/run/units \
    SYSTEMD_LOG_TARGET=console SYSTEMD_LOG_LEVEL=info \
    /lib/systemd/systemd --system --unit=basic.target --show-status=no --default-standard-output=null
'
