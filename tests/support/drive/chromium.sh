#!/bin/sh
# Installs Chromium and its driver if they are missing and this is root on Debian; else says what to install and fails.
set -eu

found() {
  command -v chromedriver >/dev/null && {
    command -v chromium || command -v chromium-browser || command -v google-chrome
  } >/dev/null
}

found && exit 0
if [ "$(id -u)" = 0 ] && [ -e /etc/debian_version ] && command -v apt-get >/dev/null; then
  echo 'make: installing chromium and chromium-driver with apt-get (once)' >&2
  export DEBIAN_FRONTEND=noninteractive
  { apt-get -qq update && apt-get -qq install --yes --no-install-recommends chromium chromium-driver; } >/dev/null || true
  found && exit 0
fi
echo 'make: skipped tests/web/browser: it needs Chromium and chromedriver (on Debian: apt install chromium chromium-driver)'
exit 1
