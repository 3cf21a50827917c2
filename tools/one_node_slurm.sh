#!/usr/bin/env bash
# A real Slurm of one node, with accounting and fake GPUs, for the tests of `truemfu sweep --launcher slurm`.
#
#   tools/one_node_slurm.sh up [GPUS]   install what is missing, start it, wait until it takes jobs (default: 2 GPUs)
#   tools/one_node_slurm.sh down        cancel its jobs, stop it, and remove its fake GPUs
#   tools/one_node_slurm.sh status      exit code 0 while it takes jobs
#
# For root on Debian 12 or newer, without systemd. `up` twice is the same as once. Daemons are stopped by their pid
# files alone. It refuses a machine on which somebody else has configured Slurm. A fake GPU is a device node that
# behaves like /dev/null: Slurm hands it out and sets CUDA_VISIBLE_DEVICES, nothing computes on it.
set -euo pipefail

MARK="# written by one_node_slurm.sh"
CONF=/etc/slurm
STATE=/var/lib/one_node_slurm
LOGS=/var/log/slurm
HOST=$(hostname -s)
DAEMONS="slurmd slurmctld slurmdbd mariadbd munged"

pid_file() {
    case $1 in
        mariadbd) echo /run/mysqld/one_node_slurm.pid ;;
        munged) echo /run/munge/munged.pid ;;
        *) echo "/run/$1.pid" ;;
    esac
}

alive() {  # whether the process of a pid file runs and is that program, not a later process with its number
    local pid
    pid=$(cat "$(pid_file "$1")" 2>/dev/null) && [ -n "$pid" ] && [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = "$1" ]
}

wait_for() {  # wait_for SECONDS WHAT COMMAND...
    local seconds=$1 what=$2 deadline
    shift 2
    deadline=$((SECONDS + seconds))
    until "$@" >/dev/null 2>&1; do
        if [ $SECONDS -ge $deadline ]; then
            echo "one_node_slurm: $what is not ready after $seconds s; see $LOGS" >&2
            exit 1
        fi
        sleep 0.3
    done
}

takes_jobs() { sinfo -h -o %T 2>/dev/null | grep -qE '^(idle|mixed|allocated|completing)$'; }

has_accounting() { sacctmgr -n list cluster format=cluster 2>/dev/null | grep -qw one; }

install_packages() {
    local program missing=""
    for program in slurmctld slurmd slurmdbd munged mariadbd sbatch; do
        command -v $program >/dev/null || missing=yes
    done
    if [ -n "$missing" ]; then
        export DEBIAN_FRONTEND=noninteractive
        local packages="slurm-wlm slurmdbd munge mariadb-server"
        # shellcheck disable=SC2086
        apt-get install -y -qq --no-install-recommends $packages >/dev/null 2>&1 ||
            { apt-get update -qq && apt-get install -y -qq --no-install-recommends $packages >/dev/null; }
    fi
}

cgroup_settings() {
    # Memory limits need a memory controller that can be written to; without one Slurm polls the processes.
    if [ -f /sys/fs/cgroup/cgroup.controllers ] && grep -qw memory /sys/fs/cgroup/cgroup.subtree_control; then
        echo "CgroupPlugin=cgroup/v2"
        echo "IgnoreSystemd=yes"
    elif [ -d /sys/fs/cgroup/memory ] && [ -d /sys/fs/cgroup/freezer ]; then
        echo "CgroupPlugin=cgroup/v1"
        echo "CgroupMountpoint=/sys/fs/cgroup"
    else
        return 1
    fi
    echo "ConstrainRAMSpace=yes"
    echo "ConstrainSwapSpace=no"
    echo "ConstrainCores=no"
    echo "ConstrainDevices=no"
}

write_configuration() {
    local gpus=$1 memory_mib tracking cgroups
    memory_mib=$(($(awk '/MemTotal/{print $2}' /proc/meminfo) / 1024 - 1024))
    tracking="ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherParams=OverMemoryKill"
    if cgroups=$(cgroup_settings); then
        tracking="ProctrackType=proctrack/cgroup
TaskPlugin=task/cgroup
JobAcctGatherType=jobacct_gather/cgroup"
        printf '%s\n%s\n' "$MARK" "$cgroups" >$CONF/cgroup.conf
    fi
    cat >$CONF/slurm.conf <<END
$MARK
ClusterName=one
SlurmctldHost=$HOST(127.0.0.1)
AuthType=auth/munge
CredType=cred/munge
SlurmUser=slurm
SlurmdUser=root
StateSaveLocation=$STATE/ctld
SlurmdSpoolDir=$STATE/d
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile=$LOGS/slurmctld.log
SlurmdLogFile=$LOGS/slurmd.log
$tracking
JobAcctGatherFrequency=2
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStorageTRES=gres/gpu
MpiDefault=none
ReturnToService=2
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=1,sched_interval=5,bf_interval=5
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
GresTypes=gpu
MinJobAge=300
KillWait=10
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
NodeName=$HOST NodeAddr=127.0.0.1 CPUs=$(nproc) RealMemory=$memory_mib Gres=gpu:$gpus State=UNKNOWN
PartitionName=main Nodes=$HOST Default=YES MaxTime=INFINITE State=UP DefMemPerCPU=2048 PriorityTier=1 PreemptMode=CANCEL
PartitionName=urgent Nodes=$HOST MaxTime=INFINITE State=UP DefMemPerCPU=2048 PriorityTier=10 PreemptMode=OFF
END
    echo "$MARK
NodeName=$HOST Name=gpu File=/dev/fakegpu[0-$((gpus - 1))]" >$CONF/gres.conf
    install -m 600 -o slurm -g slurm /dev/null $CONF/slurmdbd.conf
    cat >$CONF/slurmdbd.conf <<END
$MARK
AuthType=auth/munge
DbdHost=localhost
SlurmUser=slurm
LogFile=$LOGS/slurmdbd.log
PidFile=/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct_db
END
}

up() {
    local gpus=${1:-2} i
    if [ "$(id -u)" != 0 ]; then
        echo "one_node_slurm: must be run as root" >&2
        exit 1
    fi
    if [ -e $CONF/slurm.conf ] && ! grep -qF "$MARK" $CONF/slurm.conf; then
        echo "one_node_slurm: $CONF/slurm.conf was written by somebody else: not touched" >&2
        exit 1
    fi
    if takes_jobs && has_accounting; then
        echo "one_node_slurm: already up"
        return
    fi
    install_packages
    # Packages may have started daemons with settings of their own; none that we do not know is touched.
    install -d -o munge -g munge -m 0755 /run/munge
    install -d -o munge -g munge -m 0700 /var/lib/munge /var/log/munge
    install -d -o slurm -g slurm $STATE $STATE/ctld $LOGS
    install -d $STATE/d $CONF
    install -d -o mysql -g mysql /run/mysqld
    for ((i = 0; i < gpus; i++)); do [ -e "/dev/fakegpu$i" ] || mknod "/dev/fakegpu$i" c 1 3; done

    if [ ! -s /etc/munge/munge.key ]; then
        install -m 400 -o munge -g munge /dev/null /etc/munge/munge.key
        dd if=/dev/urandom of=/etc/munge/munge.key bs=1 count=1024 status=none
    fi
    pgrep -x munged >/dev/null || runuser -u munge -- /usr/sbin/munged
    wait_for 20 munge sh -c 'munge -n | unmunge'

    if ! mariadb -e 'select 1' >/dev/null 2>&1; then
        [ -d /var/lib/mysql/mysql ] || mariadb-install-db --user=mysql >/dev/null
        setsid runuser -u mysql -- /usr/sbin/mariadbd --bind-address=127.0.0.1 \
            --pid-file=/run/mysqld/one_node_slurm.pid --innodb-buffer-pool-size=128M \
            --innodb-lock-wait-timeout=900 </dev/null >$LOGS/mariadb.log 2>&1 &
    fi
    wait_for 60 mariadb mariadb -e 'select 1'
    mariadb -e "create database if not exists slurm_acct_db;
        create user if not exists 'slurm'@'localhost' identified by 'slurm';
        grant all on slurm_acct_db.* to 'slurm'@'localhost';"

    write_configuration "$gpus"
    for i in slurmdbd slurmctld; do
        alive $i || install -o slurm -g slurm -m 644 /dev/null "$(pid_file $i)"
    done
    alive slurmdbd || /usr/sbin/slurmdbd
    wait_for 60 slurmdbd sacctmgr -n list cluster
    has_accounting || sacctmgr -i add cluster one >/dev/null
    alive slurmctld || /usr/sbin/slurmctld
    wait_for 30 slurmctld scontrol ping
    alive slurmd || /usr/sbin/slurmd
    wait_for 60 "the node" takes_jobs
    echo "one_node_slurm: up, $(nproc) CPUs, $gpus fake GPUs, Slurm $(sinfo --version | cut -d' ' -f2)"
}

down() {
    local daemon
    if [ -e $CONF/slurm.conf ] && ! grep -qF "$MARK" $CONF/slurm.conf; then
        echo "one_node_slurm: $CONF/slurm.conf was written by somebody else: not touched" >&2
        exit 1
    fi
    if takes_jobs; then
        squeue -h -o %A | xargs -r scancel
        wait_for 60 "the end of all jobs" no_jobs
    fi
    for daemon in $DAEMONS; do
        if alive "$daemon"; then
            kill "$(cat "$(pid_file "$daemon")")" 2>/dev/null || true
            wait_for 30 "the end of $daemon" gone "$daemon"
        fi
    done
    rm -f /dev/fakegpu*
    if [ -e $CONF/slurm.conf ] && grep -qF "$MARK" $CONF/slurm.conf; then
        rm -f $CONF/slurm.conf $CONF/gres.conf $CONF/cgroup.conf $CONF/slurmdbd.conf
    fi
    echo "one_node_slurm: down"
}

no_jobs() { [ -z "$(squeue -h)" ]; }

gone() { ! alive "$1"; }

case ${1:-} in
    up) up "${2:-2}" ;;
    down) down ;;
    status) takes_jobs ;;
    *)
        sed -n '2,9s/^# \{0,1\}//p' "$0"
        exit 2
        ;;
esac
