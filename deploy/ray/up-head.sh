#!/usr/bin/env bash
# The head of a Ray cluster that `ray up` starts. As start-head.sh, but it returns once Ray runs, has the dashboard (for
# `ray job submit`) on the loopback, and starts the autoscaler where `ray up` has left it a configuration.
set -euo pipefail
# shellcheck source=environment.sh
source "$(dirname "$(readlink -f "$0")")/environment.sh"

prepare
[[ ${PORT:=6379} =~ ^[1-9][0-9]{0,4}$ && $PORT -lt 65536 ]] || fail "PORT is '$PORT': write a port from 1 to 65535"
# With provider local, version 2 starts the first further host and no other one.
export RAY_enable_autoscaler_v2=0
scaling=()
[[ ! -f ~/ray_bootstrap_config.yaml ]] || scaling=(--autoscaling-config ~/ray_bootstrap_config.yaml)
"$RAY" stop >/dev/null 2>&1 || true
# All but --block.
exec timeout "$START_TIMEOUT_S" "$RAY" start "${flags[@]:1}" --head --port "$PORT" --include-dashboard true "${scaling[@]}"
