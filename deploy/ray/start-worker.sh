#!/usr/bin/env bash
# A further node of a Ray cluster for twostroke, until a signal comes or Ray ends: also when the head took the node for
# dead and it comes back. So run it under a supervisor that starts it again (systemd/twostroke-worker.service).
#
#   HEAD                  HOST:PORT of the cluster's head: needed
#   RAY_AUTH_TOKEN_PATH   file with the cluster's token: needed
#   RAY_TLS_SERVER_CERT RAY_TLS_SERVER_KEY RAY_TLS_CA_CERT   this host's certificate, where the head has one
#   NODE_IP               this host's address (Ray's guess)
#   ROLE                  prefill or decode: which workers this host takes first (none: it takes any)
#   NUM_CPUS              that workers may ask for, as `num_cpus` of the cluster file (0: they ask for none)
#   OBJECT_STORE_BYTES    (80000000: Ray carries neither tokens nor pages)   START_TIMEOUT_S (60)   RAY (ray)
set -euo pipefail
# shellcheck source=environment.sh
source "$(dirname "$(readlink -f "$0")")/environment.sh"

prepare
[[ -n ${HEAD:-} ]] || fail "HEAD is not set: write HOST:PORT of the cluster's head"
[[ $HEAD =~ ^.+:[1-9][0-9]{0,4}$ ]] || fail "HEAD is '$HEAD': write HOST:PORT of the cluster's head"
run_ray "does a head answer at $HEAD, with this token, and with TLS and the same CA on both sides or on neither?" \
    --address "$HEAD"
