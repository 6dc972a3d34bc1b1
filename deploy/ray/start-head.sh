#!/usr/bin/env bash
# The head of a Ray cluster for twostroke, until a signal comes or Ray ends; run it under a supervisor that starts it
# again (systemd/twostroke-head.service).
#
#   RAY_AUTH_TOKEN_PATH   file with the cluster's token: needed
#   RAY_TLS_SERVER_CERT RAY_TLS_SERVER_KEY RAY_TLS_CA_CERT   this host's certificate, for TLS between all of Ray
#   PORT                  of the head (6379)
#   NODE_IP               this host's address (Ray's guess)
#   ROLE                  prefill or decode: which workers this host takes (none: it takes any)
#   GCS_STORAGE           folder for what the head has to remember over its restarts (none: a restarted head knows nothing)
#   NUM_CPUS              that workers may ask for, as `num_cpus` of the cluster file (0: they ask for none)
#   OBJECT_STORE_BYTES    (80000000: Ray carries neither tokens nor pages)   START_TIMEOUT_S (60)   RAY (ray)
set -euo pipefail
# shellcheck source=environment.sh
source "$(dirname "$(readlink -f "$0")")/environment.sh"

prepare
[[ ${PORT:=6379} =~ ^[1-9][0-9]{0,4}$ && $PORT -lt 65536 ]] || fail "PORT is '$PORT': write a port from 1 to 65535"
if [[ -n ${GCS_STORAGE:-} ]]; then
    mkdir -p "$GCS_STORAGE" 2>/dev/null || fail "GCS_STORAGE: $(id -un) cannot make the folder $GCS_STORAGE"
    [[ -w $GCS_STORAGE ]] || fail "GCS_STORAGE: $(id -un) may not write into $GCS_STORAGE"
    export RAY_gcs_storage=rocksdb RAY_gcs_storage_path=$GCS_STORAGE
fi
# No monitor: hosts that are started by hand are started by nobody else.
run_ray "is port $PORT free, and is this host's address in its certificate?" \
    --head --port "$PORT" --include-dashboard false --no-monitor
