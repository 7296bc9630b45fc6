#!/bin/sh
# redis70.sh DIRECTORY: prints the path of a redis-server 7.0, or prints the reason to stderr and exits with 1.
# It is the one on PATH, one that an earlier run has put into DIRECTORY, or Debian's, unpacked there (no root needed).
set -u
directory=$1
packages='redis-server redis-tools libjemalloc2 liblzf1 liblua5.1-0 lua-cjson lua-bitop'

none() {
  printf 'redis 7.0: SKIPPED, its tests are left out: %s\n' "$*" >&2
  exit 1
}

is_70() { "$1" --version 2>/dev/null | grep -q ' v=7\.0\.'; }

if found=$(command -v redis-server) && is_70 "$found"; then
  echo "$found"
  exit
fi
if is_70 "$directory/redis-server"; then
  echo "$(cd "$directory" && pwd)/redis-server"
  exit
fi
for tool in apt-get dpkg; do
  command -v "$tool" >/dev/null || none "no redis-server 7.0 on PATH, and without $tool none can be had from Debian"
done
mkdir -p "$directory" || none "cannot write to $directory"
directory=$(cd "$directory" && pwd)
# shellcheck disable=SC2086 # a list of words
said=$(cd "$directory" && apt-get download $packages 2>&1) ||
  none "no redis-server 7.0 on PATH, and apt-get download failed: $(printf '%s' "$said" | tail -n 1)"
for package in "$directory"/*.deb; do
  dpkg -x "$package" "$directory/root" || none "cannot unpack $package"
  rm -f "$package"
done
libraries=$(find "$directory/root" -name '*.so*' -exec dirname {} \; | sort -u | paste -s -d :)
cat >"$directory/redis-server" <<END
#!/bin/sh
LD_LIBRARY_PATH='$libraries' exec '$directory/root/usr/bin/redis-server' "\$@"
END
chmod +x "$directory/redis-server"
is_70 "$directory/redis-server" ||
  none "Debian's is another one: $("$directory/redis-server" --version 2>&1 | head -n 1)"
echo "$directory/redis-server"
