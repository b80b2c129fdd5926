# shellcheck shell=bash
# Second 0: everything that is missing, at once, before anything is changed. Sourced by quickstart.

NEED_MEMORY_MIB=3600  # a machine sold with 4 GB shows a little less
NEED_DISK_FIRST_MIB=6000
NEED_DISK_AGAIN_MIB=800
MISSING=()

missing() {
	MISSING+=("$1")
}

# The least of the machine's memory and the limits of our control group.
memory_mib() {
	local kib limit file
	kib=$(awk '/^MemTotal:/ { print $2 }' /proc/meminfo)
	for file in /sys/fs/cgroup/memory.max /sys/fs/cgroup/memory/memory.limit_in_bytes; do
		limit=$(cat "$file" 2>/dev/null || true)
		case $limit in '' | max | *[!0-9]*) continue ;; esac
		if [ "${#limit}" -lt 18 ] && [ $((limit / 1024)) -lt "$kib" ]; then kib=$((limit / 1024)); fi
	done
	echo $((kib / 1024))
}

check_disk() {
	local need=$NEED_DISK_FIRST_MIB free
	if [ -e "$VAR/image/image.json" ] && [ -x "$BIN/controld" ]; then need=$NEED_DISK_AGAIN_MIB; fi
	free=$(df -Pm "$TOP" | awk 'NR == 2 { print $4 }')
	if [ "$free" -lt "$need" ]; then missing "disk: $free MB are free at $TOP, $need MB are needed: free some, or clone to a larger disk"; fi
}

# A directory can be made and removed in the hierarchy that has this controller.
cgroup_writable() {
	local point=$1
	mkdir "$point/ephemeral-check-$$" 2>/dev/null && rmdir "$point/ephemeral-check-$$" 2>/dev/null
}

# Where a controller lives: "v2 POINT" or "v1 POINT".
cgroup_point() {
	local v2
	v2=$(awk '$3 == "cgroup2" { print $2; exit }' /proc/mounts)
	if [ -n "$v2" ] && grep -qw "$1" "$v2/cgroup.controllers" 2>/dev/null; then
		echo "v2 $v2"
	else
		awk -v c="$1" '$3 == "cgroup" && ("," $4 ",") ~ ("," c ",") { print "v1 " $2; exit }' /proc/mounts
	fi
}

check_cgroups() {
	local controller where bad=()
	for controller in memory pids cpu; do
		where=$(cgroup_point "$controller")
		if [ -z "$where" ] || ! cgroup_writable "${where#* }"; then bad+=("$controller"); fi
	done
	CGROUPS="cgroups ${where%% *}"
	if [ -z "$(awk '$3 == "cgroup2" { print $2; exit }' /proc/mounts)" ]; then bad+=("cgroup2"); fi
	if [ "${#bad[@]}" -gt 0 ]; then
		missing "writable control groups (${bad[*]}): in a container start it with --privileged; on a host mount cgroup2 read-write"
	fi
}

check_address() {
	local port=${LISTEN##*:}
	if [ -n "$(pid_of controld)" ] && [ "$(saved listen)" = "$LISTEN" ]; then return 0; fi
	if [ -n "$(pid_of controld)" ] && [ "$(saved listen | sed 's/.*://')" = "$port" ]; then return 0; fi
	if port_taken "$port"; then missing "a free port: something else listens on $port: end it, or start with --listen 127.0.0.1:$(free_port $((port + 1)))"; fi
}

# A device that opens is not enough: without the processor's own virtualization it runs only guests that were made for it.
has_kvm() {
	grep -qE -m 1 '^flags.* (vmx|svm)( |$)' /proc/cpuinfo && [ -c /dev/kvm ] && (exec 3<>/dev/kvm) 2>/dev/null
}

check_model() {
	local name
	if [ -z "${EPHEMERAL_MODEL_BASE_URL:-}" ]; then
		for name in EPHEMERAL_MODEL EPHEMERAL_MODEL_API_KEY EPHEMERAL_MODEL_INPUT_PRICE EPHEMERAL_MODEL_OUTPUT_PRICE; do
			if [ -n "${!name:-}" ]; then missing "EPHEMERAL_MODEL_BASE_URL: $name is set, the provider's URL is not (https://…/v1)"; fi
		done
		return 0
	fi
	case $EPHEMERAL_MODEL_BASE_URL in
	http://*/v1 | https://*/v1) ;;
	*) missing "EPHEMERAL_MODEL_BASE_URL = $EPHEMERAL_MODEL_BASE_URL: it must begin with http:// or https:// and end in /v1" ;;
	esac
	if [ -z "${EPHEMERAL_MODEL:-}" ]; then missing "EPHEMERAL_MODEL: the name that the provider gives the model"; fi
	if [ -z "${EPHEMERAL_MODEL_API_KEY:-}" ]; then missing "EPHEMERAL_MODEL_API_KEY: the provider's key (any word where it wants none)"; fi
	for name in EPHEMERAL_MODEL_INPUT_PRICE EPHEMERAL_MODEL_OUTPUT_PRICE; do
		if [ -n "${!name:-}" ]; then
			price_ok "${!name}" || missing "$name = ${!name}: it must be dollars per million tokens, for example 0.25"
		elif [ ! -t 0 ] && { [ -z "${EPHEMERAL_MODEL:-}" ] || ! remembered_prices; }; then
			missing "$name: dollars per million tokens; prices are not guessed"
		fi
	done
}

price_ok() {
	[[ $1 =~ ^[0-9]{1,6}(\.[0-9]{1,6})?$ ]]
}

check_all() {
	local memory
	memory=$(memory_mib)
	if [ "$(uname -s) $(uname -m)" != 'Linux x86_64' ]; then missing "an x86-64 machine with Linux: this one is $(uname -s) $(uname -m)"; fi
	if [ "$(id -u)" -ne 0 ]; then missing "root: the host part makes control groups and namespaces: sudo deploy/quickstart"; fi
	if [ "$memory" -lt "$NEED_MEMORY_MIB" ]; then missing "memory: $memory MB are here, 4 GB are needed"; fi
	check_disk
	if [ "$(id -u)" -eq 0 ]; then
		check_cgroups
		unshare --mount true 2>/dev/null || missing "namespaces: unshare is refused here; start the container with --privileged"
	fi
	check_address
	check_model
	if [ -n "$(packages_missing)" ] && ! command -v apt-get >/dev/null; then
		missing "apt-get: these packages are needed and this is no Debian: $(packages_missing | tr '\n' ' ')"
	fi
	if [ "${#MISSING[@]}" -eq 0 ]; then return 0; fi
	erase
	{
		printf '%squickstart cannot start here. What is missing:%s\n' "$RED" "$PLAIN"
		printf '  - %s\n' "${MISSING[@]}"
	} >&2
	exit 1
}

machine_text() {
	local kvm='KVM'
	has_kvm || kvm='no KVM'
	echo "x86-64, $(nproc) CPUs, $(memory_mib) MB memory, $(df -Pm "$TOP" | awk 'NR == 2 { print $4 }') MB disk, ${CGROUPS:-cgroups}, $kvm"
}
