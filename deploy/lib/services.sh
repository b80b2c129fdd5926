# shellcheck shell=bash
# controld and noded: their configurations, start, restart when program or configuration changed. Sourced by quickstart.

# saved NAME [VALUE]: small facts that later starts need; reading prints nothing when there is none.
saved() {
	if [ $# -eq 2 ]; then
		(umask 077 && printf '%s\n' "$2" >"$VAR/state/$1.new" && mv "$VAR/state/$1.new" "$VAR/state/$1")
	elif [ -f "$VAR/state/$1" ]; then
		cat "$VAR/state/$1"
	fi
}

# A new database knows nobody: what was made in the old one is forgotten.
forget_setup() {
	stop_process noded INT 40 || true # with its runs: a TERM would leave them for the next one
	stop_process controld TERM 15 || true
	rm -f "$VAR/state/org" "$VAR/state/api-key" "$VAR/state/operator-key" "$VAR/state/models" "$VAR/etc/join-token"
	rm -rf "$VAR/node"
}

# choose_port VARIABLE NAME DEFAULT: the port of an inner listener, kept over starts; another when a stranger has taken it.
PORTS_CHOSEN=' '
choose_port() {
	local port
	port=$(saved "port-$2")
	if [ -z "$port" ]; then port=$3; fi
	if [ -z "$(pid_of controld)" ] || [ -z "$(saved "port-$2")" ]; then
		while port_taken "$port" || [ "$port" = "${LISTEN##*:}" ] || [[ $PORTS_CHOSEN == *" $port "* ]]; do port=$((port + 1)); done
	fi
	PORTS_CHOSEN="$PORTS_CHOSEN$port "
	saved "port-$2" "$port"
	printf -v "$1" '%s' "$port"
}

write_secret() {
	(umask 077 && cat >"$1.new" && mv "$1.new" "$1")
}

# --- controld ---------------------------------------------------------------------------------------------------------------------

controld_config() {
	choose_port OPERATOR_PORT operator 8081
	choose_port LINK_PORT link 7443
	choose_port METRICS_PORT metrics 9464
	choose_port NODE_METRICS_PORT node-metrics 9465
	choose_port SCRIPTED_PORT scripted 7444
	OPERATOR_URL=http://127.0.0.1:$OPERATOR_PORT
	if [ ! -s "$VAR/etc/scripted-token" ]; then head -c 24 /dev/urandom | od -An -tx1 | tr -d ' \n' | write_secret "$VAR/etc/scripted-token"; fi
	{
		echo '# written by deploy/quickstart at each start'
		echo "database = host=$PG_SOCKET dbname=ephemeral user=ephemeral"
		echo "listen = $LISTEN"
		echo "operator_listen = 127.0.0.1:$OPERATOR_PORT"
		echo "link_listen = 127.0.0.1:$LINK_PORT"
		echo "metrics_listen = 127.0.0.1:$METRICS_PORT"
		echo "keyring = $VAR/control/keyring"
		echo "tls_dir = $VAR/control/tls"
		if [ -z "${EPHEMERAL_MODEL_BASE_URL:-}" ]; then
			echo "scripted_listen = 127.0.0.1:$SCRIPTED_PORT"
			echo "scripted_token_file = $VAR/etc/scripted-token"
		fi
	} | write_secret "$VAR/etc/controld.conf"
}

# Its listeners and Postgres need no right of root. What is kept is walking into a clone that belongs to somebody else.
CONTROLD=(setpriv --inh-caps=-all,+dac_read_search --bounding-set=-all,+dac_read_search --no-new-privs -- "$BIN/controld")

controld_bootstrap() {
	local out log=$VAR/log/controld.log
	local options=(bootstrap --config "$VAR/etc/controld.conf" --json)
	if [ -z "$(saved operator-key)" ] && [ -s "$VAR/control/keyring" ]; then options+=(--new-operator-key); fi
	install -d -m 0700 "$VAR/control"
	if ! out=$("${CONTROLD[@]}" "${options[@]}" 2>>"$log"); then
		fail "controld bootstrap failed" "the log says why; to begin afresh: deploy/quickstart down, then remove $VAR/pg and $VAR/control" "$log"
	fi
	out=$(tail -n 1 <<<"$out" | jq -r '.operator_key // empty')
	if [ -n "$out" ]; then saved operator-key "$out"; fi
	if [ -z "$(saved operator-key)" ]; then fail "controld bootstrap gave no operator key" "deploy/quickstart down, remove $VAR/control, start again" "$log"; fi
}

controld_start() {
	local stamp log=$VAR/log/controld.log
	step controld "starting"
	controld_config
	stamp=$(stamp_of "$BIN/controld" "$VAR/etc/controld.conf")
	if same_stamp controld "$stamp" && [ -n "$(saved operator-key)" ]; then
		done_step "running"
		return 0
	fi
	stop_process controld TERM 15 || true
	controld_bootstrap
	rm -f "$VAR/run/ready"
	mkfifo -m 0600 "$VAR/run/ready"
	exec 7<>"$VAR/run/ready"
	start_process controld "${CONTROLD[@]}" serve --config "$VAR/etc/controld.conf" --ready-fd 7
	if ! wait_ready controld "starting" 30; then
		fail "controld does not start" "the log says why; then start again" "$log"
	fi
	exec 7>&-
	echo "$stamp" >"$VAR/run/controld.stamp"
	saved listen "$LISTEN"
	done_step "listens on $LISTEN"
	case $LISTEN in
	127.* | localhost:* | '[::1]:'*) ;;
	*) warn "Others can reach it, by plain HTTP: put a TLS proxy in front before a key crosses a network." ;;
	esac
}

# --- noded ------------------------------------------------------------------------------------------------------------------------

# Containers with cgroup v2: controllers can be given to groups below only when the group above holds no process. On a host the top
# group is free of this rule; in a container our top group is an ordinary one, so its processes move into a group of their own.
cgroup_prepare() {
	local v2 controller pid
	v2=$(awk '$3 == "cgroup2" { print $2; exit }' /proc/mounts)
	for controller in memory pids cpu; do
		grep -qw "$controller" "$v2/cgroup.controllers" || continue
		grep -qw "$controller" "$v2/cgroup.subtree_control" && continue
		echo "+$controller" 2>/dev/null >"$v2/cgroup.subtree_control" && continue
		[ -e "$v2/cgroup.type" ] || continue
		mkdir -p "$v2/ephemeral-rest"
		while read -r pid; do
			echo "$pid" 2>/dev/null >"$v2/ephemeral-rest/cgroup.procs" || true
		done < <(cat "$v2/cgroup.procs")
		echo "+$controller" 2>/dev/null >"$v2/cgroup.subtree_control" || true
	done
}

noded_config() {
	local emulation=off kvm=auto
	has_kvm || emulation=allow kvm=off
	{
		echo '# written by deploy/quickstart at each start'
		echo "state_dir = $VAR/node"
		echo "run_dir = $RUN/node"
		echo "image_dir = $VAR/image"
		echo "node_name = quickstart"
		echo "controld = tls+tcp://127.0.0.1:$LINK_PORT"
		echo "join_token_file = $VAR/etc/join-token"
		echo "emulation = $emulation"
		echo "kvm = $kvm"
		echo "metrics_listen = 127.0.0.1:$NODE_METRICS_PORT"
		echo "uid_base = $UID_BASE"
		echo "cgroup_parent = /ephemeral-$TAG"
	} | write_secret "$VAR/etc/noded.conf"
}

# node_seen SINCE: has controld heard from our noded after this time (as in its JSON), and does its lease hold?
node_seen() {
	admin node list --json 2>/dev/null |
		jq -e --arg since "$1" '.data[] | select(.name == "quickstart" and .live and .last_seen_at > $since)' >/dev/null 2>&1
}

noded_start() {
	local stamp deadline since class=kvm log=$VAR/log/noded.log
	step noded "starting"
	has_kvm || class=emulated
	noded_config
	stamp=$(stamp_of "$BIN/noded" "$VAR/etc/noded.conf" "$VAR/image/image.json")
	if same_stamp noded "$stamp" && node_seen ""; then
		done_step "running, class $class"
		return 0
	fi
	stop_process noded TERM 40 || true
	cgroup_prepare
	if [ ! -e "$VAR/node/node" ]; then
		install -d -m 0700 "$VAR/node"
		admin node token --uses 1 --expires-in 3600 --isolation "$class" 2>>"$log" | write_secret "$VAR/etc/join-token"
		if [ ! -s "$VAR/etc/join-token" ]; then fail "no join token could be made" "see whether controld runs: deploy/quickstart status" "$log"; fi
	fi
	since=$(date -u +%Y-%m-%dT%H:%M:%S.%3NZ)
	start_process noded "$BIN/noded" --config "$VAR/etc/noded.conf"
	deadline=$((SECONDS + 30))
	until node_seen "$since"; do
		if [ -z "$(pid_of noded)" ]; then fail "noded does not start" "the log says why; then start again" "$log"; fi
		if [ "$SECONDS" -ge "$deadline" ]; then
			fail "noded does not join" "the logs say why; to enrol it afresh: deploy/quickstart down, remove $VAR/node, start again" "$log"
		fi
		moving "joining"
		sleep 0.05
	done
	echo "$stamp" >"$VAR/run/noded.stamp"
	done_step "joined, class $class"
	if [ "$class" = emulated ]; then
		warn "No KVM here: microVMs are emulated by QEMU. They work the same, only slower, and emulation is not sold as isolation."
	fi
}
