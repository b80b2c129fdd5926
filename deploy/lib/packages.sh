# shellcheck shell=bash
# Debian packages of ../packages/{build,host,image,run}. apt is not touched when all of them are there. Sourced by quickstart.

LIBEVENT_MIN=2.1.12-stable-8+deb12u1 # older revisions can be crashed from the network; the build refuses them
LIBEVENT='libevent-2.1-7 libevent-core-2.1-7 libevent-extra-2.1-7 libevent-pthreads-2.1-7'
CREATECLUSTER=/etc/postgresql-common/createcluster.conf

packages_wanted() {
	local list=("$TOP"/deploy/packages/{build,host,image,run})
	sed -e 's/#.*//' "${list[@]}" | tr -s ' \t' '\n' | sed '/^$/d' | sort -u
}

packages_missing() {
	local installed version
	command -v dpkg-query >/dev/null || { packages_wanted; return; }
	installed=$(dpkg-query -W -f '${db:Status-Status} ${Package}\n' 2>/dev/null | sed -n 's/^installed //p' | sort -u)
	comm -23 <(packages_wanted) <(echo "$installed")
	version=$(dpkg-query -W -f '${Version}' libevent-core-2.1-7 2>/dev/null || true)
	if [ -n "$version" ] && dpkg --compare-versions "$version" lt "$LIBEVENT_MIN" 2>/dev/null; then tr ' ' '\n' <<<"$LIBEVENT"; fi
}

# Installing Debian's Postgres makes and starts a cluster of its own, unless its settings say no. They are put back afterwards: existing
# clusters are not touched by this, and later ones are made as always.
hold_clusters() {
	if [ -e "$CREATECLUSTER" ]; then cp -p "$CREATECLUSTER" "$VAR/run/createcluster.conf.before"; fi
	mkdir -p "${CREATECLUSTER%/*}"
	{
		echo '# deploy/quickstart keeps Debian from making a cluster while it installs Postgres; this file goes away again.'
		echo 'create_main_cluster = false'
	} >"$CREATECLUSTER"
}

release_clusters() {
	[ -e "$CREATECLUSTER" ] && grep -q '^# deploy/quickstart keeps' "$CREATECLUSTER" || return 0
	if [ -e "$VAR/run/createcluster.conf.before" ]; then
		mv "$VAR/run/createcluster.conf.before" "$CREATECLUSTER"
	elif [ -e /usr/share/postgresql-common/createcluster.conf ]; then
		cp /usr/share/postgresql-common/createcluster.conf "$CREATECLUSTER"
	else
		rm -f "$CREATECLUSTER"
	fi
}

apt_run() {
	DEBIAN_FRONTEND=noninteractive UCF_FORCE_CONFFOLD=1 apt-get -q -o Dpkg::Use-Pty=0 -o Dpkg::Options::=--force-confold \
		-o Acquire::Retries=3 -o DPkg::Lock::Timeout=120 "$@"
}

packages_install() {
	local wanted log=$VAR/log/packages.log
	mapfile -t wanted < <(packages_missing)
	step packages "looking"
	if [ "${#wanted[@]}" -eq 0 ]; then
		done_step "all $(packages_wanted | wc -l) are installed"
		return 0
	fi
	hold_clusters
	: >"$log"
	(apt_run update && apt_run install -y --no-install-recommends "${wanted[@]}") >>"$log" 2>&1 </dev/null &
	if ! wait_child $! "$log"; then
		release_clusters
		fail "packages could not be installed: ${wanted[*]}" \
			"see that the Debian mirror can be reached (/etc/apt/sources.list, http_proxy), then start again; the whole log is $log" "$log"
	fi
	release_clusters
	done_step "${#wanted[@]} installed with what they need"
}
