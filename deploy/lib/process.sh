# shellcheck shell=bash
# Processes that outlive quickstart: started in a session of their own, remembered by pid and start time, so that `down` ends exactly
# these and never a stranger that got the same pid. Sourced by quickstart; needs VAR.

# Start time of a live process (clock ticks since boot), empty when there is none or it is a zombie.
start_time() {
	local stat rest
	{ read -r stat <"/proc/$1/stat"; } 2>/dev/null || return 0
	rest=${stat##*) } # the name in parentheses may hold anything
	# shellcheck disable=SC2086
	set -- $rest
	case $1 in Z | X) return 0 ;; esac
	echo "${20}"
}

# The pid of a process of ours that lives, empty otherwise.
pid_of() {
	local pid started
	{ read -r pid started <"$VAR/run/$1.pid"; } 2>/dev/null || return 0
	if [ -n "$started" ] && [ "$(start_time "$pid")" = "$started" ]; then echo "$pid"; fi
}

# start_process NAME COMMAND...: output goes to var/log/NAME.log. Descriptor 7 is passed on (ready), 8 is the lock and is not.
start_process() {
	local name=$1 pid started
	shift
	setsid -- "$@" >>"$VAR/log/$name.log" 2>&1 </dev/null 8>&- &
	pid=$!
	started=$(start_time "$pid")
	printf '%s %s\n' "$pid" "${started:-gone}" >"$VAR/run/$name.pid"
}

# wait_ready NAME TEXT SECONDS: the line that the process writes to descriptor 7 when it is ready, in READY; false when it ended or took
# too long. The line on the terminal says TEXT meanwhile.
wait_ready() {
	local deadline=$((SECONDS + $3))
	READY=
	while ! read -r -t 0.1 -u 7 READY; do
		if [ -z "$(pid_of "$1")" ] || [ "$SECONDS" -ge "$deadline" ]; then
			# It may have written its line just before.
			read -r -t 0.01 -u 7 READY && return 0
			return 1
		fi
		moving "$2"
	done
}

# stop_process NAME SIGNAL SECONDS: asks, waits, and only then kills. False when there was nothing to end.
stop_process() {
	local name=$1 pid deadline
	pid=$(pid_of "$name")
	if [ -z "$pid" ]; then
		rm -f "$VAR/run/$name.pid" "$VAR/run/$name.stamp"
		return 1
	fi
	kill "-$2" "$pid" 2>/dev/null || true
	deadline=$((SECONDS + $3))
	while [ -n "$(pid_of "$name")" ]; do
		if [ "$SECONDS" -ge "$deadline" ]; then
			kill -KILL "$pid" 2>/dev/null || true
			deadline=$((SECONDS + 10))
		fi
		sleep 0.05
	done
	rm -f "$VAR/run/$name.pid" "$VAR/run/$name.stamp"
}

# What a running process was started from: its program and its configuration.
stamp_of() {
	cat -- "$@" | sha256sum | cut -c 1-64
}

same_stamp() {
	[ -n "$(pid_of "$1")" ] && [ -f "$VAR/run/$1.stamp" ] && [ "$(cat "$VAR/run/$1.stamp")" = "$2" ]
}

# Is something listening on this TCP port (any address)?
port_taken() {
	local hex
	hex=$(printf ':%04X' "$1")
	awk -v port="$hex" '$4 == "0A" && substr($2, length($2) - 4) == port { found = 1 } END { exit !found }' /proc/net/tcp /proc/net/tcp6 2>/dev/null
}

# The first port from $1 on where nothing listens.
free_port() {
	local port=$1
	while port_taken "$port"; do port=$((port + 1)); done
	echo "$port"
}
