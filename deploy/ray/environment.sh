# shellcheck shell=bash
# Read by start-head.sh and start-worker.sh: their environment is checked, and made into what Ray reads.

fail() {
    echo "twostroke: $1" >&2
    exit 2
}

check_file() { # NAME: of a variable that names a file which can be read and says something
    [[ -f ${!1} ]] || fail "$1: there is no file ${!1}"
    [[ -r ${!1} ]] || fail "$1: $(id -un) may not read ${!1}"
    [[ -s ${!1} ]] || fail "$1: ${!1} is empty"
    printf -v "$1" %s "$(realpath -s "${!1}")" # Ray's processes stand elsewhere; links stay links, for rotation
}

use_token() {
    [[ -n ${RAY_AUTH_TOKEN_PATH:-} ]] || fail "RAY_AUTH_TOKEN_PATH is not set: name the file with the cluster's token (openssl rand -hex 32 > FILE; chmod 600 FILE), the same on every host"
    check_file RAY_AUTH_TOKEN_PATH
    unset RAY_AUTH_TOKEN # it would win over the file, and other processes could read it
    export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH
}

use_certificates() {
    local name count=0
    for name in RAY_TLS_SERVER_CERT RAY_TLS_SERVER_KEY RAY_TLS_CA_CERT; do
        [[ -n ${!name:-} ]] && count=$((count + 1))
    done
    if [[ $count -eq 0 ]]; then
        [[ ${RAY_USE_TLS:-0} == 0 ]] || fail "RAY_USE_TLS is set without RAY_TLS_SERVER_CERT, RAY_TLS_SERVER_KEY and RAY_TLS_CA_CERT"
        return
    fi
    [[ $count -eq 3 ]] || fail "TLS needs all of RAY_TLS_SERVER_CERT, RAY_TLS_SERVER_KEY and RAY_TLS_CA_CERT"
    for name in RAY_TLS_SERVER_CERT RAY_TLS_SERVER_KEY RAY_TLS_CA_CERT; do
        check_file "$name"
    done
    export RAY_USE_TLS=1 RAY_TLS_SERVER_CERT RAY_TLS_SERVER_KEY RAY_TLS_CA_CERT
}

use_timing() { # dead nodes are known after four to six seconds, dead workers after a fifth of one
    export RAY_health_check_initial_delay_ms=${RAY_health_check_initial_delay_ms:-1000}
    export RAY_health_check_period_ms=${RAY_health_check_period_ms:-1000}
    export RAY_health_check_timeout_ms=${RAY_health_check_timeout_ms:-1000}
    export RAY_health_check_failure_threshold=${RAY_health_check_failure_threshold:-3}
    export RAY_timeout_ms_task_wait_for_death_info=${RAY_timeout_ms_task_wait_for_death_info:-100}
    export RAY_core_worker_internal_heartbeat_ms=${RAY_core_worker_internal_heartbeat_ms:-200}
    # How long nodes go on without a head that restarts.
    export RAY_gcs_rpc_server_reconnect_timeout_s=${RAY_gcs_rpc_server_reconnect_timeout_s:-120}
    # Else Ray starts an idle process for each CPU that it is told of.
    export RAY_enable_worker_prestart=${RAY_enable_worker_prestart:-0}
    export RAY_prestart_worker_first_driver=${RAY_prestart_worker_first_driver:-0}
    # Ray lowers its workers' priority by 15; ours are what this machine is for.
    export RAY_worker_niceness=${RAY_worker_niceness:-0}
}

find_ray() {
    RAY=${RAY:-ray}
    command -v "$RAY" >/dev/null || fail "RAY: there is no command $RAY; name the one of twostroke's environment, as in RAY=/opt/twostroke/.venv/bin/ray"
}

prepare() {
    case ${ROLE:-} in
    "" | prefill | decode) ;;
    *) fail "ROLE is '$ROLE': write prefill or decode, or leave it away where the node may take any worker" ;;
    esac
    [[ ${START_TIMEOUT_S:=60} =~ ^[1-9][0-9]*$ ]] || fail "START_TIMEOUT_S is '$START_TIMEOUT_S': write whole seconds"
    [[ ${OBJECT_STORE_BYTES:=80000000} =~ ^[1-9][0-9]*$ ]] || fail "OBJECT_STORE_BYTES is '$OBJECT_STORE_BYTES': write whole bytes"
    use_token
    use_certificates
    use_timing
    find_ray
    [[ ${NUM_CPUS:=0} =~ ^[0-9]+$ ]] || fail "NUM_CPUS is '$NUM_CPUS': write a whole number"
    flags=(--block --disable-usage-stats --num-cpus "$NUM_CPUS" --object-store-memory "$OBJECT_STORE_BYTES")
    [[ -z ${NODE_IP:-} ]] || flags+=(--node-ip-address "$NODE_IP")
    [[ -z ${ROLE:-} ]] || flags+=(--labels "role=$ROLE")
}

end_ray() { # PID: told first, so that it ends what it has started
    kill -TERM "$1" 2>/dev/null || true
    for _ in {1..50}; do
        kill -0 "$1" 2>/dev/null || return 0
        sleep 0.1
    done
    kill -KILL "$1" 2>/dev/null || true
}

# Ray waits for ever for a head that does not answer, or that refuses its certificate: so it has a time to get through.
run_ray() { # WHY_NOT FLAG ...
    local why_not=$1 said ray
    shift
    said=$(mktemp)
    "$RAY" start "${flags[@]}" "$@" >"$said" 2>&1 &
    ray=$!
    trap 'kill -TERM "$ray" 2>/dev/null || true' TERM INT
    local until_s=$((SECONDS + START_TIMEOUT_S))
    while kill -0 "$ray" 2>/dev/null && ! grep -q "Ray runtime started" "$said"; do
        if [[ $SECONDS -ge $until_s ]]; then
            end_ray "$ray"
            tail -n 5 "$said" >&2
            rm -f "$said"
            echo "twostroke: Ray has not started within $START_TIMEOUT_S s: $why_not" >&2
            exit 1
        fi
        sleep 0.2
    done
    cat "$said" # whole, or what Ray says of why it ended
    local has_started=1
    grep -q "Ray runtime started" "$said" || has_started=0
    rm -f "$said"
    local status=0
    wait "$ray" || status=$?
    # A signal ends the wait, not Ray: it has some seconds to end what it started.
    while kill -0 "$ray" 2>/dev/null; do wait "$ray" || status=$?; done
    [[ $has_started -eq 1 ]] || echo "twostroke: Ray did not start: $why_not" >&2
    exit "$status"
}
