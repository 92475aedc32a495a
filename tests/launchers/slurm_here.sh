#!/usr/bin/env bash
# A private one-node Slurm for tests: munged, slurmctld and slurmd on this
# machine, with every file they write under one directory.
#
#   slurm_here.sh start DIR    install if needed, start, wait until the node is idle
#   slurm_here.sh stop DIR     kill all jobs, end all daemons, leave no process (logs stay)
#
# After `start`, `. DIR/env.sh` (or SLURM_CONF=DIR/slurm.conf) points sbatch,
# srun, squeue, ... at it.  Partitions, both on the one node:
#
#   low    (default)  preemptable: SIGTERM, GRACE seconds later killed, requeued
#   high              its jobs preempt those in `low`
#
# Exit codes: 0 done; 2 wrong usage; 3 Slurm cannot be installed or started here
# (one line on stderr, "slurm_here: ...", says why; a test may skip on it).
#
# Settings (environment):
#   SLURM_HERE_CPUS=2       CPUs the node claims, whatever the machine has
#   SLURM_HERE_GRACE=30     seconds from the SIGTERM of a preemption to the kill
#   SLURM_HERE_KILLWAIT=30  seconds from SIGTERM to SIGKILL on scancel or time limit
#   SLURM_HERE_REQUEUE=5    seconds a requeued job waits (Slurm's own default: 120)
#   SLURM_HERE_INSTALL=1    0: never call apt-get, exit 3 if Slurm is absent
set -euo pipefail

NODE=localhost  # a job's tasks see this name as SLURM_STEP_NODELIST: it must resolve
CPUS=${SLURM_HERE_CPUS:-2}
GRACE=${SLURM_HERE_GRACE:-30}
KILLWAIT=${SLURM_HERE_KILLWAIT:-30}
REQUEUE=${SLURM_HERE_REQUEUE:-5}
INSTALL=${SLURM_HERE_INSTALL:-1}
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin

log() { printf 'slurm_here: %s\n' "$*"; }
usage() { printf 'usage: %s start|stop DIR\n' "${0##*/}" >&2; exit 2; }

# Stops all that was started before it exits.
unavailable() {
  local why=$*
  stop_all >/dev/null 2>&1 || true
  printf 'slurm_here: Slurm unavailable: %s\n' "$why" >&2
  exit 3
}

# ---------------------------------------------------------------- processes

alive() {  # PID: runs, and is no zombie (a container's PID 1 may never reap)
  local stat
  stat=$(cat "/proc/$1/stat" 2>/dev/null) || return 1
  stat=${stat##*) }
  [[ ${stat%% *} != Z ]]
}

wait_gone() {  # SECONDS PID...
  local end=$((SECONDS + $1)) pid
  shift
  for pid in "$@"; do
    while alive "$pid"; do
      ((SECONDS < end)) || return 1
      sleep 0.1
    done
  done
}

daemon_pid() {  # NAME: its PID if that process is still the daemon of this DIR
  local pid
  pid=$(cat "$DIR/run/$1.pid" 2>/dev/null) || return 1
  [[ $pid =~ ^[0-9]+$ ]] && alive "$pid" || return 1
  tr '\0' '\n' <"/proc/$pid/environ" 2>/dev/null | grep -qxF "SLURM_CONF=$DIR/slurm.conf" || return 1
  echo "$pid"
}

# All processes under this DIR's Slurm: the jobs' tasks, slurmstepd and other
# children of a daemon.  They have its SLURM_CONF; so has a shell or a pytest
# that only sourced env.sh, but without SLURM_JOB_ID and with another program
# than a daemon of Slurm.
slurm_pids() {
  local proc pid env
  for proc in /proc/[0-9]*; do
    pid=${proc#/proc/}
    [[ $pid != "$$" && $pid != "$BASHPID" ]] || continue
    env=$'\n'$(tr '\0' '\n' 2>/dev/null <"$proc/environ") || continue
    [[ $env$'\n' == *$'\n'"SLURM_CONF=$DIR/slurm.conf"$'\n'* ]] || continue
    if [[ $env == *$'\n'SLURM_JOB_ID=* || $(readlink "$proc/exe" 2>/dev/null) =~ /slurm(ctld|d|stepd)[^/]*$ ]]; then
      alive "$pid" && echo "$pid"
    fi
  done
  return 0
}

# ---------------------------------------------------------------- install

install_slurm() {
  local tool missing=() begin=$SECONDS log=$DIR/log/apt.log
  for tool in munged slurmctld slurmd sbatch srun sinfo; do
    command -v "$tool" >/dev/null || missing+=("$tool")
  done
  ((${#missing[@]})) || return 0
  [[ $INSTALL != 0 ]] || unavailable "not installed (${missing[*]}), and SLURM_HERE_INSTALL=0"
  ((EUID == 0)) || unavailable "not installed (${missing[*]}), and only root can install it"
  command -v apt-get >/dev/null || unavailable "not installed (${missing[*]}), and there is no apt-get"
  # RUNLEVEL=1 and the absence of systemd keep the packages from starting daemons.
  local apt=(env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get -y
    -o Acquire::Retries=2 -o Acquire::http::Timeout=30 -o DPkg::Lock::Timeout=120)
  local packages=(slurm-wlm munge)
  # The package lists may be absent (a slim image) or stale: then fetch them and retry.
  if ! "${apt[@]}" install --no-install-recommends "${packages[@]}" >"$log" 2>&1 </dev/null; then
    "${apt[@]}" update >>"$log" 2>&1 </dev/null ||
      unavailable "apt-get update failed, see $log"
    "${apt[@]}" install --no-install-recommends "${packages[@]}" >>"$log" 2>&1 </dev/null ||
      unavailable "apt-get install ${packages[*]} failed, see $log"
  fi
  hash -r
  log "installed ${packages[*]} in $((SECONDS - begin)) s"
}

# ---------------------------------------------------------------- configuration

# COUNT TCP ports on which nothing listens, below the usual ephemeral range
# (32768-) and out of the range that jax.distributed draws from (61440-).
free_ports() {
  local count=$1 used port chosen=' '
  used=$(awk 'FNR > 1 { n = split($2, part, ":"); print part[n] }' /proc/net/tcp /proc/net/tcp6 2>/dev/null || true)
  while ((count)); do
    port=$((20000 + RANDOM % 12000))
    [[ $chosen != *" $port "* ]] || continue
    grep -qixF "$(printf '%04X' "$port")" <<<"$used" && continue
    chosen+="$port "
    count=$((count - 1))
  done
  echo "$chosen"
}

configure() {
  local ports user host version
  user=$(id -un)
  host=$(hostname -s 2>/dev/null || uname -n)
  read -ra ports < <(free_ports 2)

  [[ -s $DIR/munge/key ]] || (umask 077 && head -c 128 /dev/urandom >"$DIR/munge/key")

  cat >"$DIR/slurm.conf" <<CONF
ClusterName=here
SlurmctldHost=$host(127.0.0.1)
SlurmUser=$user
SlurmdUser=$user
AuthType=auth/munge
CredType=cred/munge
# cred_expire is also what a requeued job waits before it may start again.
AuthInfo=socket=$DIR/munge/socket,cred_expire=$REQUEUE
SlurmctldPort=${ports[0]}
SlurmdPort=${ports[1]}

StateSaveLocation=$DIR/state
SlurmdSpoolDir=$DIR/spool
SlurmctldPidFile=$DIR/run/slurmctld.own.pid
SlurmdPidFile=$DIR/run/slurmd.own.pid
SlurmctldLogFile=$DIR/log/slurmctld.log
SlurmdLogFile=$DIR/log/slurmd.log
SlurmctldDebug=info
SlurmdDebug=info

# No cgroups, no systemd, no accounting.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
# Mail would need a mail program.
MailProg=/bin/true

SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=$KILLWAIT

JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PriorityType=priority/basic
SchedulerType=sched/backfill
# Look at the queue every second or two, not every 30 or 60.
SchedulerParameters=sched_interval=2,batch_sched_delay=0,bf_interval=2

NodeName=$NODE NodeHostname=$host NodeAddr=127.0.0.1 CPUs=$CPUS RealMemory=1000 State=UNKNOWN
PartitionName=low  Nodes=$NODE Default=YES State=UP MaxTime=INFINITE DefaultTime=60 PriorityTier=1  PreemptMode=REQUEUE GraceTime=$GRACE
PartitionName=high Nodes=$NODE Default=NO  State=UP MaxTime=INFINITE DefaultTime=60 PriorityTier=10 PreemptMode=OFF
CONF

  # Slurm 22.05 knows no "disabled"; it leaves cgroups alone when no plugin asks.
  version=$(slurmd -V | grep -oE '[0-9]+\.[0-9]+' | head -1)
  if [[ $(printf '%s\n' 23.02 "$version" | sort -V | head -1) == 23.02 ]]; then
    echo 'CgroupPlugin=disabled' >"$DIR/cgroup.conf"
  else
    : >"$DIR/cgroup.conf"
  fi

  printf 'export SLURM_CONF=%q\n' "$DIR/slurm.conf" >"$DIR/env.sh"
}

# ---------------------------------------------------------------- start, stop

# NAME COMMAND...: in the background in a session of its own, without the
# caller's pipes (a pytest that captures output would wait for them).
launch() {
  local name=$1
  shift
  (cd "$DIR" && exec setsid "$@" >>"$DIR/log/$name.out" 2>&1 </dev/null) &
  echo $! >"$DIR/run/$name.pid"
}

launched() { alive "$(<"$DIR/run/$1.pid")"; }  # NAME: has not ended since

why_ended() {  # NAME: the last line of its log
  local log=("$DIR/log/$1.log" "$DIR/log/$1.out") line
  # Slurm logs harmless errors at every start; what ends it is "fatal".
  line=$(cat "${log[@]}" 2>/dev/null | grep -i fatal | tail -1) ||
    line=$(cat "${log[@]}" 2>/dev/null | tail -1) || true
  printf '%s ended: %s (logs: %s)' "$1" "${line:-no reason given}" "$DIR/log"
}

start_all() {
  local name var end begin=$SECONDS
  # A Slurm job that starts this one must not pass its own settings on.
  for var in $(compgen -e | grep -E '^(SLURM|SBATCH|SRUN|SQUEUE|SINFO)_' | grep -v '^SLURM_HERE_'); do unset "$var"; done
  export SLURM_CONF=$DIR/slurm.conf

  # Unix sockets under DIR: the kernel allows 107 characters for their paths.
  ((${#DIR} <= 70)) || unavailable "the path $DIR is too long for its sockets (70 characters at most)"
  for name in munged slurmctld slurmd; do
    ! daemon_pid "$name" >/dev/null || unavailable_running "$name"
  done
  rm -rf "$DIR/log"  # of an earlier start
  mkdir -p "$DIR"/{munge,run,log,state,spool}
  chmod 755 "$DIR/munge"

  install_slurm
  configure

  # --force: a parent directory others cannot enter (pytest's tmp_path) is fine,
  # all of this runs as one user.
  launch munged munged --foreground --force --num-threads=2 \
    --key-file="$DIR/munge/key" --socket="$DIR/munge/socket" \
    --pid-file="$DIR/run/munged.own.pid" --log-file="$DIR/log/munged.log" \
    --seed-file="$DIR/munge/seed"
  end=$((SECONDS + 20))
  until munge --socket="$DIR/munge/socket" -n 2>/dev/null | unmunge --socket="$DIR/munge/socket" >/dev/null 2>&1; do
    launched munged || unavailable "$(why_ended munged)"
    ((SECONDS < end)) || unavailable "munged does not answer (logs: $DIR/log)"
    sleep 0.2
  done

  launch slurmctld slurmctld -D
  launch slurmd slurmd -D
  end=$((SECONDS + 60))
  until [[ $(timeout 10 sinfo -h -N -p low -o %T 2>/dev/null) == idle ]]; do
    for name in slurmctld slurmd; do
      launched "$name" || unavailable "$(why_ended "$name")"
    done
    ((SECONDS < end)) ||
      unavailable "the node is not idle after 60 s: $(timeout 10 sinfo -h -N -p low -o '%T, %E' 2>&1 | tail -1) (logs: $DIR/log)"
    sleep 0.3
  done
  log "$(slurmd -V) up in $((SECONDS - begin)) s; use it with: . $DIR/env.sh"
}

unavailable_running() {  # not code 3: the caller started it twice
  log "already running in $DIR ($1); stop it first" >&2
  exit 2
}

# Jobs get no notice: their processes are killed, and the record of them is
# removed, so that a later start in the same DIR does not run them again.
stop_all() {
  local pids
  is_own_directory || return 0
  stop_daemon slurmd  # first: it would wait 10 s for a controller that is gone
  stop_daemon slurmctld
  # More than once, for what was started while its parent was being killed.
  for _ in 1 2 3; do
    mapfile -t pids < <(slurm_pids)
    ((${#pids[@]})) || break
    kill -KILL "${pids[@]}" 2>/dev/null || true
    wait_gone 5 "${pids[@]}" || true
  done
  stop_daemon munged
  rm -rf "$DIR/run" "$DIR/state" "$DIR/spool"
}

stop_daemon() {
  local pid
  pid=$(daemon_pid "$1") || return 0
  kill -TERM "$pid" 2>/dev/null || true
  wait_gone 4 "$pid" || kill -KILL "$pid" 2>/dev/null || true
}

# Start and stop remove files: only in a directory that this script filled.
is_own_directory() { [[ $(head -1 "$DIR/slurm.conf" 2>/dev/null) == "ClusterName=here" ]]; }

(($# == 2)) && [[ -n $2 ]] || usage
DIR=$(realpath -m -- "$2")
case $1 in
  start)
    # Other failures (a full disk, for example) are reported in the same way.
    trap 'rc=$?; [[ $rc =~ ^[023]$ ]] || unavailable "start failed with exit code $rc"' EXIT
    [[ $DIR != *[[:space:],]* ]] || unavailable "no space or comma may be in $DIR"
    [[ ! -e $DIR || -z $(ls -A "$DIR" 2>&1) ]] || is_own_directory || { log "$DIR is not empty" >&2; exit 2; }
    mkdir -p "$DIR" 2>/dev/null || unavailable "cannot make $DIR"
    is_own_directory || echo ClusterName=here >"$DIR/slurm.conf"  # marks the directory; the full file is written later
    start_all
    ;;
  stop)
    stop_all
    log "stopped"
    ;;
  *) usage ;;
esac
