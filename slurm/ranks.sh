# shellcheck shell=bash
# What job scripts share, train.sbatch and those of launch.py: the ranks start, and start again inside the allocation.
# Sourced by scripts that set SUITE, host_python (which has the suite's packages) and flags, an array: those of the run.

finish() { # OPTIONS, with the exit code of srun: the last message, and the requeue where the ranks could not
    REQUEUE_ON_CRASH=${REQUEUE_ON_CRASH:-0} "$host_python" "$SUITE/slurm/requeue.py" "$@" -- "${flags[@]}"
}

run_ranks() { # ARGUMENTS OF SRUN: until the run has ended, or has left this allocation; exits with the job's code
    local code running placed where=()
    placed=$(mktemp) # which nodes take part, once some have died (LEAST_NODES)
    export TRAINING_RESTARTS=0 LEAST_NODES=${LEAST_NODES:-}
    if [ "${SLURM_RESTART_COUNT:-0}" != 0 ]; then
        TRAINING_RESTARTS=$(finish --count 2>/dev/null) || TRAINING_RESTARTS=$SLURM_RESTART_COUNT
    fi
    while true; do
        command srun "${where[@]}" "$@" &
        running=$!
        # srun would wait for a node that is gone
        if [ -n "$LEAST_NODES" ]; then finish --attend $running & fi
        wait $running
        code=$?
        while [ $code -gt 128 ] && kill -0 $running 2>/dev/null; do # a signal ends `wait`, not srun
            wait $running
            code=$?
        done
        finish --exit_code $code --can_start --place "$placed"
        code=$?
        [ $code = 76 ] || { rm -f "$placed" && exit $code; } # START_AGAIN of requeue.py: within this allocation
        mapfile -t where <"$placed"
        TRAINING_RESTARTS=$((TRAINING_RESTARTS + 1))
        echo "job $SLURM_JOB_ID (start $((TRAINING_RESTARTS + 1))) on $SLURM_JOB_NODELIST" "${where[@]}"
    done
}
