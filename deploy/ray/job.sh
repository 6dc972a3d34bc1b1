#!/usr/bin/env bash
# The launcher as a Ray job: deploy/ray/job.sh CLUSTER_FILE [FLAG OF twostroke up ...]
#
#   RAY_API_SERVER_ADDRESS   of the head's dashboard (http://127.0.0.1:8265: on the head, or through `ray dashboard`)
#   RAY_AUTH_TOKEN_PATH      file with the cluster's token
#   JOB                      its name (twostroke)   RAY (ray)
#
# It runs on the head. `ray job stop` ends it; workers and supervisor go on (--keep), and the next job takes them over.
# End them with: twostroke down --address HEAD:6379
set -euo pipefail
# shellcheck source=environment.sh
source "$(dirname "$(readlink -f "$0")")/environment.sh"

[[ $# -ge 1 ]] || fail "name the cluster file: $0 CLUSTER_FILE"
file=$1
shift
[[ -r $file ]] || fail "$file: there is no such file"
use_token
find_ray
export RAY_API_SERVER_ADDRESS=${RAY_API_SERVER_ADDRESS:-http://127.0.0.1:8265}
# The job's folder is a copy of the file's: small, or Ray refuses it.
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cp "$file" "$folder/cluster.yaml"
# A name is taken until its job has ended and is deleted; what it logged stays, and the next one's follows.
"$RAY" job delete "${JOB:=twostroke}" >/dev/null 2>&1 || true
"$RAY" job submit --no-wait --submission-id "$JOB" --working-dir "$folder" -- \
    twostroke up --file cluster.yaml --address auto --keep "$@"
