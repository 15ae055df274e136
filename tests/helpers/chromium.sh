#!/usr/bin/env bash
# A Chromium for the tests that open pages in a real browser: Debian's or Ubuntu's package, where there is none yet.
#
#   chromium.sh install
#
# Exit status: 0 it is there, 3 this machine cannot have one (one line on stderr says why), others are failures.
set -euo pipefail

impossible() {
    echo "chromium.sh: $*" >&2
    exit 3
}

there() {
    command -v chromium || command -v chromium-browser || command -v google-chrome || command -v google-chrome-stable
}

apt_get() {
    DEBIAN_FRONTEND=noninteractive timeout 300 apt-get --yes --no-install-recommends -o DPkg::Lock::Timeout=240 \
        -o Acquire::Retries=1 -o Acquire::http::Timeout=20 "$@"
}

install() {
    ! there >/dev/null || return 0
    [ "$(id -u)" = 0 ] || impossible "there is no Chromium, and installing one needs root"
    command -v apt-get >/dev/null || impossible "there is no Chromium and no apt-get to install one"
    local log reason
    log=$(mktemp)
    # apt-get update succeeds without a network; the installation then fails.
    if ! { apt_get update && apt_get install chromium fonts-liberation; } >"$log" 2>&1 </dev/null; then
        reason=$(grep -m 1 '^[EW]:' "$log" || tail -n 1 "$log")
        rm -f "$log"
        impossible "apt-get cannot install Chromium (no network?): $reason"
    fi
    rm -f "$log"
    there >/dev/null || impossible "the package lacks the program"
}

case "${1:-}" in
install) install ;;
*)
    echo "chromium.sh: usage: $0 install" >&2
    exit 1
    ;;
esac
