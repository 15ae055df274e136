#!/usr/bin/env bash
# A real SLURM on this one machine, for the tests: pretended nodes on the loopback interface with pretended GPUs,
# without systemd, nothing outside $SLURM_TEST_PREFIX touched. Needs root, and Debian's or Ubuntu's SLURM packages.
#
#   slurm_cluster.sh install                   the packages, where they are absent
#   slurm_cluster.sh start [NODES=3] [GPUS=4]  a fresh cluster in place of the old one; returns when all are idle
#   slurm_cluster.sh stop                      ends every process of the cluster; also where none or half of one runs
#   slurm_cluster.sh start-node N              a slurmd for node N, where it has none
#   slurm_cluster.sh kill-node N               kill -9 its slurmd: the tasks on it go on, as after a lost network
#   slurm_cluster.sh crash-node N              kill -9 all that runs on it: slurmd, tasks and everything they started
#   eval "$(slurm_cluster.sh env)"             lets sbatch, srun, scontrol, ... talk to this cluster
#
#   SLURM_TEST_PREFIX  folder of everything (default /tmp/slurm-hybrid), at most 60 characters
#   SLURM_TEST_PORT    slurmctld's port; the next NODES ports are the nodes' (default 18800)
#   SLURM_TEST_OWNER   a process id: the cluster stops by itself when that process is gone (default none)
#
# Exit status: 0 done, 3 this machine cannot run a SLURM (one line on stderr says why), others are failures.
set -euo pipefail

PREFIX=${SLURM_TEST_PREFIX:-/tmp/slurm-hybrid}
PORT=${SLURM_TEST_PORT:-18800}
CPUS=8 # pretended, of each node
NEEDED=(munged slurmctld slurmd sbatch srun scontrol squeue sinfo)
PATH=$PATH:/usr/sbin:/sbin
export SLURM_CONF=$PREFIX/etc/slurm.conf # also the mark by which `stop` knows this cluster's daemons

fail() {
    echo "slurm_cluster.sh: $*" >&2
    exit 1
}

impossible() {
    echo "slurm_cluster.sh: $*" >&2
    exit 3
}

missing_commands() {
    local name
    for name in "${NEEDED[@]}"; do command -v "$name" >/dev/null || echo "$name"; done
}

within() { # within SECONDS COMMAND...: repeat the command until it succeeds
    local end=$((SECONDS + $1))
    shift
    until "$@" >/dev/null 2>&1; do
        [ $SECONDS -lt $end ] || return 1
        sleep 0.05
    done
}

# ---- installation ---------------------------------------------------------------------------------------------------

install() {
    [ "$(id -u)" = 0 ] || impossible "must be root"
    [ -n "$(missing_commands)" ] || return 0
    command -v apt-get >/dev/null || impossible "SLURM is not installed and there is no apt-get"
    local log
    log=$(mktemp)
    # apt-get update succeeds without a network; the installation then fails.
    if ! { apt_get update && apt_get install slurmctld slurmd slurm-client munge; } >"$log" 2>&1 </dev/null; then
        local reason
        reason=$(grep -m 1 '^[EW]:' "$log" || tail -n 1 "$log")
        rm -f "$log"
        impossible "apt-get cannot install SLURM (no network?): $reason"
    fi
    rm -f "$log"
    [ -z "$(missing_commands)" ] || impossible "the packages lack $(missing_commands | xargs)"
}

apt_get() {
    DEBIAN_FRONTEND=noninteractive timeout 300 apt-get --yes --no-install-recommends -o DPkg::Lock::Timeout=60 \
        -o Acquire::Retries=1 -o Acquire::http::Timeout=20 "$@"
}

# ---- configuration --------------------------------------------------------------------------------------------------

write_configuration() {
    local nodes=$1 gpus=$2 node gpu range gres
    mkdir -p "$PREFIX"/{etc,run,log,state,dev}
    (umask 077 && head -c 1024 /dev/urandom >"$PREFIX/etc/munge.key")
    for ((node = 1; node <= nodes; node++)); do
        mkdir -p "$PREFIX/nodes/node$node" "$PREFIX/spool/node$node"
        { cat /etc/hosts && for ((n = 1; n <= nodes; n++)); do echo "127.0.1.$n node$n"; done; } \
            >"$PREFIX/nodes/node$node/hosts"
    done
    # Character devices: SLURM derives CUDA_VISIBLE_DEVICES from their numbers. These are /dev/null.
    for ((gpu = 0; gpu < gpus; gpu++)); do
        mknod "$PREFIX/dev/nvidia$gpu" c 1 3 || impossible "devices cannot be made in $PREFIX (needs CAP_MKNOD)"
    done
    gres="" && : >"$PREFIX/etc/gres.conf"
    if [ "$gpus" -gt 0 ]; then
        gres="Gres=gpu:$gpus"
        echo "Name=gpu File=$PREFIX/dev/nvidia[0-$((gpus - 1))] Flags=nvidia_gpu_env" >"$PREFIX/etc/gres.conf"
    fi
    # Never looked at, as no plug-in below uses cgroups, but slurmd 22.05 wants a kind and refuses "disabled".
    printf '%s\n' CgroupPlugin=cgroup/v1 CgroupMountpoint=/nonexistent CgroupAutomount=no >"$PREFIX/etc/cgroup.conf"
    range="1-$nodes"
    cat >"$SLURM_CONF" <<END
ClusterName=hybrid
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=$PORT
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$PREFIX/state
SlurmdSpoolDir=$PREFIX/spool/%n
SlurmctldPidFile=$PREFIX/run/slurmctld.pid
SlurmdPidFile=$PREFIX/run/%n.pid
SlurmctldLogFile=$PREFIX/log/slurmctld.log
SlurmdLogFile=$PREFIX/log/%n.log
MailProg=/bin/true
# A port for the ranks to meet at is often computed from the job id: two clusters on one machine must not share ids.
FirstJobId=$((PORT * 40))
MinJobAge=3600

# A job that is requeued may start again after cred_expire: 5 s is the least (SLURM's default is 120 s).
AuthType=auth/munge
AuthInfo=socket=$PREFIX/run/munge.sock,cred_expire=5

ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc=$PREFIX/log/jobs.txt

SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0

# Time limit, scancel, requeue: TERM, then KILL after KillWait. Preemption: the job's --signal at once, TERM after the
# partition's GraceTime, then KILL. Output files are truncated by a requeue (JobFileAppend=0), as on most clusters.
JobRequeue=1
KillWait=5
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal

# A silent node is DOWN after 20 to 30 s and returns by itself; one set DOWN by scontrol stays so until RESUME.
SlurmdTimeout=10
ReturnToService=1

# config_overrides: believe these numbers whatever the machine has.
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=node[$range] NodeAddr=127.0.1.[$range] Port=[$((PORT + 1))-$((PORT + nodes))] \
    CPUs=$CPUS Sockets=1 CoresPerSocket=$CPUS ThreadsPerCore=1 RealMemory=500000 $gres State=UNKNOWN
# debug: the default. nograce: TERM comes at once on preemption. cancelled: preemption ends the job. high: preempts all.
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=10 PreemptMode=REQUEUE State=UP
PartitionName=nograce Nodes=ALL MaxTime=INFINITE PriorityTier=1 GraceTime=0 PreemptMode=REQUEUE State=UP
PartitionName=cancelled Nodes=ALL MaxTime=INFINITE PriorityTier=1 GraceTime=10 PreemptMode=CANCEL State=UP
PartitionName=high Nodes=ALL MaxTime=INFINITE PriorityTier=10 State=UP
END
}

# ---- processes ------------------------------------------------------------------------------------------------------

# Processes on node $1 (without $1: on all nodes). A node is a mount namespace in which /etc/hosts is the node's own
# file, so that whatever a job starts is found, with any environment and after the death of its parents.
node_processes() {
    local process hosts
    for process in /proc/[0-9]*; do
        for hosts in "$PREFIX"/nodes/${1:-*}/hosts; do
            if [ "$process/root/etc/hosts" -ef "$hosts" ]; then echo "${process#/proc/}"; fi
        done
    done
}

slurmd_of() { # process id of node $1's slurmd, nothing where it has none
    local process name
    for process in $(node_processes "$1"); do
        # A child that is about to become a step daemon has the same name for a moment; the pid file tells them apart.
        { read -r name <"/proc/$process/comm"; } 2>/dev/null || continue
        if [ "$name" = slurmd ] && [ "$process" = "$(cat "$PREFIX/run/$1.pid" 2>/dev/null)" ]; then echo "$process"; fi
    done
}

# munged, slurmctld and its helper. Not by pid files: a start that was interrupted may not have written them yet.
central_processes() {
    local process name
    for process in /proc/[0-9]*; do
        { read -r name <"$process/comm"; } 2>/dev/null || continue
        case $name in
        munged | slurmctld | slurmscriptd)
            if grep -qzxF "SLURM_CONF=$SLURM_CONF" "$process/environ" 2>/dev/null; then echo "${process#/proc/}"; fi
            ;;
        esac
    done
}

kill_all() { # kill_all COMMAND...: kill -9 what the command lists until it lists nothing
    local attempt processes
    for ((attempt = 0; attempt < 100; attempt++)); do
        mapfile -t processes < <("$@")
        [ ${#processes[@]} -gt 0 ] || return 0
        kill -9 "${processes[@]}" 2>/dev/null || true
        sleep 0.05
    done
    fail "processes survive kill -9: ${processes[*]}"
}

# ---- commands -------------------------------------------------------------------------------------------------------

start() {
    local nodes=$1 gpus=$2 node
    [[ $PREFIX =~ ^/[A-Za-z0-9/._-]+$ ]] || fail "SLURM_TEST_PREFIX must be a plain absolute path and is $PREFIX"
    # slurmstepd appends up to 45 characters for its sockets, whose whole name must stay below 108
    [ ${#PREFIX} -le 60 ] || fail "SLURM_TEST_PREFIX has more than 60 characters: $PREFIX"
    [ "$(id -u)" = 0 ] || impossible "must be root"
    [ -z "$(missing_commands)" ] || impossible "not installed: $(missing_commands | xargs)"
    unshare --mount --uts true 2>/dev/null || impossible "this container allows no namespaces (needs CAP_SYS_ADMIN)"
    stop
    trap 'stop' EXIT # until the cluster is complete
    write_configuration "$nodes" "$gpus"
    watch_owner
    # --force: pytest's folders are private, which munged dislikes. Daemons must not keep a caller's pipes open.
    munged --force --socket="$PREFIX/run/munge.sock" --key-file="$PREFIX/etc/munge.key" \
        --pid-file="$PREFIX/run/munged.pid" --seed-file="$PREFIX/run/munged.seed" --log-file="$PREFIX/log/munged.log" \
        --origin=127.0.0.1 --num-threads=2 </dev/null >>"$PREFIX/log/munged.log" 2>&1 || start_failed munged
    slurmctld -c -f "$SLURM_CONF" </dev/null >>"$PREFIX/log/slurmctld.out" 2>&1 || start_failed slurmctld
    for ((node = 1; node <= nodes; node++)); do start_node "$node"; done
    within 60 all_idle "$nodes" || start_failed slurmctld
    trap - EXIT
}

start_failed() {
    tail -n 20 "$PREFIX/log/$1".* >&2 || true
    fail "$1 did not start; the end of its log is above"
}

all_idle() {
    [ "$(timeout 5 sinfo --noheader --Node --partition=debug --format=%t | grep -cx idle)" = "$1" ]
}

start_node() {
    [ -d "$PREFIX/nodes/node$1" ] || fail "there is no node$1"
    if has_slurmd "node$1"; then return 0; fi
    # its own host name, and /etc/hosts with the names of all nodes
    unshare --mount --uts sh -c '
        hostname "$2" && mount --bind "$1/nodes/$2/hosts" /etc/hosts && exec slurmd -f "$SLURM_CONF" -N "$2"
    ' sh "$PREFIX" "node$1" </dev/null >>"$PREFIX/log/node$1.out" 2>&1 || start_failed "node$1"
    within 20 has_slurmd "node$1" || start_failed "node$1" # it returns from its parent before it has a pid file
}

has_slurmd() {
    [ -n "$(slurmd_of "$1")" ]
}

kill_node() {
    [ -d "$PREFIX/nodes/node$1" ] || fail "there is no node$1"
    kill_all slurmd_of "node$1"
}

crash_node() {
    [ -d "$PREFIX/nodes/node$1" ] || fail "there is no node$1"
    kill_all node_processes "node$1"
}

stop() {
    # No farewells: the state is thrown away. slurmctld goes first, so that nothing is started or requeued meanwhile.
    kill_all central_processes
    kill_all node_processes
    rm -rf "$PREFIX"/{run,state,spool,dev,nodes,etc} # log/ stays, for whoever looks for a reason
}

# pytest may be killed before it stops the cluster. The watcher ends with the owner or with the cluster.
watch_owner() {
    local owner=${SLURM_TEST_OWNER:-}
    [ -n "$owner" ] || return 0
    echo "$owner $$" >"$PREFIX/run/owner"
    setsid "${BASH_SOURCE[0]}" watch "$owner $$" </dev/null >/dev/null 2>&1 &
}

watch() {
    while [ "$(cat "$PREFIX/run/owner" 2>/dev/null)" = "$1" ]; do
        if ! kill -0 "${1% *}" 2>/dev/null; then
            stop
            return
        fi
        sleep 1
    done
}

case "${1:-}" in
install) install ;;
start) start "${2:-3}" "${3:-4}" ;;
stop) stop ;;
start-node) start_node "${2:?number of the node}" ;;
kill-node) kill_node "${2:?number of the node}" ;;
crash-node) crash_node "${2:?number of the node}" ;;
env) echo "export SLURM_CONF=$SLURM_CONF" ;;
watch) watch "${2:?owner}" ;;
*) fail "usage: $0 install | start [NODES] [GPUS] | stop | start-node N | kill-node N | crash-node N | env" ;;
esac
