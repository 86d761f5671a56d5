#!/usr/bin/env bash
# Train on several machines that Slurm lends. Submit from a folder that all of them see, which has the environment `.venv`:
#
#   sbatch --nodes=3 clusters/slurm.sh recipes/sglang.toml --rollout-num-gpus 8 --update-weight-transport disk
#
# Ray places the trainer's ranks on the GPUs of all machines but one, and the SGLang servers on those that are left. The run itself is
# on the first machine. Submitted again, the same command goes on from the newest checkpoint. docs/clusters.md explains it.
#
#SBATCH --job-name=slime
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@300
#SBATCH --output=slime-%j.log

set -euo pipefail

port=${SLIME_RAY_PORT:-6379}
export PATH="$SLURM_SUBMIT_DIR/.venv/bin:$PATH"
cd "$SLURM_SUBMIT_DIR"

if (($# == 0)); then
    echo "found no recipe; wanted: sbatch [--nodes=N] clusters/slurm.sh RECIPE.toml [--flag value ...]" >&2
    exit 2
fi
if ((SLURM_JOB_NUM_NODES < 2)); then
    echo "found $SLURM_JOB_NUM_NODES machine; wanted 2 or more: one is left to the servers, the others train" >&2
    exit 2
fi
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
head_ip=$(srun --nodes=1 --ntasks=1 --nodelist="$head" --overlap hostname --ip-address | awk '{print $1}')
trainers=$((SLURM_JOB_NUM_NODES - 1))
gpus=${SLURM_GPUS_ON_NODE:?wanted --gpus-per-node}
# Who has this token may run code in the cluster; Slurm hands the environment on to the steps of this job.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT

# Where the machine is busy, Ray gives up after half a minute: so each process of it is started again, and what looks for them asks again.
again='for try in 1 2 3; do "$@" && exit; sleep 5; done; exit 1'
srun --nodes=1 --ntasks=1 --nodelist="$head" --overlap \
    bash -c "$again" - \
    ray start --head --node-ip-address="$head_ip" --port="$port" --num-gpus="$gpus" \
    --include-dashboard=false --disable-usage-stats --block &
for ((tries = 0; ; tries++)); do
    if ray health-check --address "$head_ip:$port" 2>/dev/null; then break; fi
    if ((tries == 60)); then echo "Ray's head does not answer at $head_ip:$port" >&2; exit 1; fi
    sleep 2
done
srun --nodes="$trainers" --ntasks="$trainers" --exclude="$head" --overlap \
    bash -c "$again" - \
    ray start --address="$head_ip:$port" --num-gpus="$gpus" --disable-usage-stats --block &

export RAY_ADDRESS="$head_ip:$port"
python - "$SLURM_JOB_NUM_NODES" <<'PYTHON'
import sys, time
import ray

wanted, deadline = int(sys.argv[1]), time.monotonic() + 300
while not ray.is_initialized():
    try:
        ray.init(log_to_driver=False)
    except ConnectionError:
        if time.monotonic() > deadline:
            raise
        time.sleep(2)
while (found := sum(node["Alive"] for node in ray.nodes())) < wanted:
    if time.monotonic() > deadline:
        sys.exit(f"found {found} machines in the Ray cluster after 300 s; wanted {wanted}")
    time.sleep(1)
PYTHON

slime train "$@" --launcher ray --actor-num-nodes "$trainers" --actor-num-gpus-per-node "$gpus" &
run=$!
# Slurm says TERM to this script five minutes before the time is up: then the run saves what is done, and ends.
trap 'kill -TERM "$run"' TERM
status=0
wait "$run" || status=$?
while kill -0 "$run" 2>/dev/null; do # the wait was cut short by the signal
    status=0
    wait "$run" || status=$?
done
exit "$status"
