#!/usr/bin/env bash
# A further node of a Ray cluster that `ray up` starts. As start-worker.sh, but it returns once Ray runs.
set -euo pipefail
# shellcheck source=environment.sh
source "$(dirname "$(readlink -f "$0")")/environment.sh"

# Of hosts of one's own: a word in a file says which workers a host takes. Clouds label their nodes themselves.
[[ -n ${ROLE:-} || ! -r /etc/twostroke/role ]] || ROLE=$(</etc/twostroke/role)
prepare
[[ ${HEAD:-} =~ ^.+:[1-9][0-9]{0,4}$ ]] || fail "HEAD is '${HEAD:-}': write HOST:PORT of the cluster's head"
"$RAY" stop >/dev/null 2>&1 || true
# All but --block.
exec timeout "$START_TIMEOUT_S" "$RAY" start "${flags[@]:1}" --address "$HEAD"
