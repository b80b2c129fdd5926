# shellcheck shell=bash
# The programs (cmake preset release) and the guest image, made at the same time, each only if something changed. Sourced by quickstart.

PROGRAMS=(controld noded guest-agent ephemeral)

build_programs() {
	local cache=$TOP/build/release/CMakeCache.txt
	cd "$TOP" || return
	# A tree that was moved or copied takes its build along, and cmake refuses that.
	if [ -f "$cache" ] && ! grep -q "^CMAKE_HOME_DIRECTORY:INTERNAL=$TOP\$" "$cache"; then rm -rf "$TOP/build/release"; fi
	if [ ! -f "$TOP/build/release/build.ninja" ]; then cmake --preset release; fi
	cmake --build --preset release --target "${PROGRAMS[@]}"
}

image_and_build() {
	local image_log=$VAR/log/image.log build_log=$VAR/log/build.log image_pid build_pid
	step build "starting"
	: >"$image_log"
	: >"$build_log"
	"$TOP/deploy/guest-image/build" >"$VAR/run/image-dir" 2>"$image_log" </dev/null &
	image_pid=$!
	build_programs >"$build_log" 2>&1 </dev/null &
	build_pid=$!
	while kill -0 "$build_pid" 2>/dev/null || kill -0 "$image_pid" 2>/dev/null; do
		check_builds
		moving "$(build_state "$build_pid" "$build_log" "$image_pid" "$image_log")"
		sleep 0.1
	done
	check_builds
	image_pack
	done_step "programs in build/release/bin, guest image ready"
}

# Ends everything as soon as one of the two has failed; the other one is not worth waiting for.
check_builds() {
	if ! kill -0 "$build_pid" 2>/dev/null && ! wait "$build_pid"; then
		kill "$image_pid" 2>/dev/null || true
		wait "$image_pid" || true
		grep -E -m 5 ': (fatal )?error:|^CMake Error|undefined reference' "$build_log" >&2 || true
		fail "the programs could not be built" "the whole log is $build_log; a changed compiler is cured by removing build/release" "$build_log"
	fi
	if ! kill -0 "$image_pid" 2>/dev/null && ! wait "$image_pid"; then
		kill "$build_pid" 2>/dev/null || true
		wait "$build_pid" || true
		fail "the guest image could not be made" "the lines above say what to do; the whole log is $image_log" "$image_log"
	fi
}

build_state() {
	local text=
	if kill -0 "$1" 2>/dev/null; then text="programs $(last_line "$2" | grep -o '^\[[0-9]*/[0-9]*\]' || true)"; fi
	if kill -0 "$3" 2>/dev/null; then text="$text${text:+ · }image $(last_line "$4" | sed 's/^\[[^]]*\] *//; s/^image: *//')"; fi
	echo "$text"
}

# The agent is in the initramfs: it is packed again whenever it changed.
image_pack() {
	local dir stamp
	dir=$(tail -n 1 "$VAR/run/image-dir")
	stamp="$dir $(stamp_of "$BIN/guest-agent" "$dir/manifest.json" "$TOP/deploy/guest-image/pack")"
	if [ -s "$VAR/image/image.json" ] && [ "$(saved image)" = "$stamp" ]; then return 0; fi
	if ! "$TOP/deploy/guest-image/pack" --image "$dir" --agent "$BIN/guest-agent" --out "$VAR/image" >>"$VAR/log/image.log" 2>&1; then
		fail "the guest image could not be packed" "the log says why" "$VAR/log/image.log"
	fi
	saved image "$stamp"
}
