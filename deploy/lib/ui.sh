# shellcheck shell=bash
# What the person in front of quickstart sees: one line a step with the time since the start and the step's own time, a moving line
# while a step works (terminals only), failures that say what to do and where the log is. Sourced by quickstart.

NOW_MS=0
STARTED_MS=0
STEP_NAME=
STEP_MS=0
STEP_NAMES=()
STEP_SECONDS=()
MOVING=0 # 1 while an unfinished line stands on the terminal

now() {
	local t=${EPOCHREALTIME/[.,]/}
	NOW_MS=$((t / 1000))
}

# 1234 -> 1.2
seconds_of() {
	printf '%d.%d' $(($1 / 1000)) $(($1 % 1000 / 100))
}

ui_start() {
	now
	STARTED_MS=$NOW_MS
	BOLD="" DIM="" GREEN="" RED="" YELLOW="" PLAIN=""
	if [ -t 1 ] && [ -z "${NO_COLOR:-}" ] && [ "${TERM:-}" != dumb ]; then
		BOLD=$'\e[1m' DIM=$'\e[2m' GREEN=$'\e[32m' RED=$'\e[31m' YELLOW=$'\e[33m' PLAIN=$'\e[0m'
	fi
}

erase() {
	if [ "$MOVING" = 1 ]; then printf '\r\e[K'; fi
	MOVING=0
}

# A finished line: time since the start, name, text.
line() {
	erase
	now
	printf '%s%7s s%s  %-9s %s\n' "$DIM" "$(seconds_of $((NOW_MS - STARTED_MS)))" "$PLAIN" "$1" "$2"
}

# A further line below the one before.
more() {
	erase
	printf '%20s%s\n' '' "$1"
}

warn() {
	erase
	printf '%20s%s%s%s\n' '' "$YELLOW" "$1" "$PLAIN"
}

# The line that moves, on a terminal; elsewhere a line every 15 s, so that a log shows that something goes on.
LAST_SHOWN_MS=0
moving() {
	now
	if [ -t 1 ]; then
		local text
		text=$(printf '%7s s  %-9s %s' "$(seconds_of $((NOW_MS - STARTED_MS)))" "$STEP_NAME" "$1")
		printf '\r\e[K%s%s%s' "$DIM" "${text:0:$((${COLUMNS:-80} - 1))}" "$PLAIN"
		MOVING=1
	elif [ $((NOW_MS - LAST_SHOWN_MS)) -ge 15000 ] && [ $((NOW_MS - STEP_MS)) -ge 5000 ]; then
		line "$STEP_NAME" "… $1"
		LAST_SHOWN_MS=$NOW_MS
	fi
}

step() {
	now
	STEP_NAME=$1
	STEP_MS=$NOW_MS
	moving "${2:-}"
}

# done_step TEXT: ends the step that `step` began.
done_step() {
	now
	local took=$((NOW_MS - STEP_MS))
	STEP_NAMES+=("$STEP_NAME")
	STEP_SECONDS+=("$((took / 1000)).$(printf '%03d' $((took % 1000)))")
	if [ "$took" -ge 100 ]; then
		line "$STEP_NAME" "$1 $DIM($(seconds_of "$took") s)$PLAIN"
	else
		line "$STEP_NAME" "$1"
	fi
}

# fail WHAT REMEDY [LOG]
fail() {
	erase
	{
		printf '\n%s%s%s\n' "$RED" "quickstart: $1" "$PLAIN"
		if [ -n "${3:-}" ] && [ -s "$3" ]; then
			printf '  the last lines of %s:\n' "$3"
			tail -n 12 -- "$3" | tr -d '\000-\010\013-\037\177' | sed 's/^/    /'
		fi
		printf '  What to do: %s\n' "$2"
	} >&2
	exit 1
}

# wait_child PID LOG: waits for a child of ours while the line moves with the last line of its log. Its exit status.
wait_child() {
	while kill -0 "$1" 2>/dev/null; do
		moving "$(last_line "$2")"
		sleep 0.2
	done
	wait "$1"
}

last_line() {
	tail -n 1 -- "$1" 2>/dev/null | tr -d '\000-\037\177' | cut -c 1-100
}
