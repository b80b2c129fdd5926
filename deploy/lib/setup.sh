# shellcheck shell=bash
# What the deployment holds: models with prices, an organization with credit, a member key, the CLI's login, var/env. Sourced by quickstart.

CREDIT=20           # dollars that the organization gets once
COMPUTE=0.0002      # dollars a second of a running microVM

# The API through the CLI, as the operator. The key is in the environment, never in an argument.
admin() {
	EPHEMERAL_OPERATOR_KEY=$(saved operator-key) EPHEMERAL_OPERATOR_URL=$OPERATOR_URL "$BIN/ephemeral" admin "$@"
}

# must WHAT COMMAND...
must() {
	local what=$1
	shift
	if ! "$@" >>"$VAR/log/setup.log" 2>&1; then
		fail "$what failed" "the log says why; then start again" "$VAR/log/setup.log"
	fi
}

# --- models -----------------------------------------------------------------------------------------------------------------------

prices_file() {
	printf '%s %s\n' "$EPHEMERAL_MODEL_BASE_URL" "$EPHEMERAL_MODEL" | sha256sum | cut -c 1-16
}

remembered_prices() {
	[ -s "$VAR/state/prices-$(prices_file)" ]
}

# ask_price VARIABLE QUESTION
ask_price() {
	local answer
	erase
	while :; do
		read -r -p "                    $2, in dollars per million tokens: " answer || fail "$1 is needed" "set $1 and start again"
		if price_ok "$answer"; then break; fi
		echo "                    A number such as 0.25 is needed."
	done
	printf -v "$1" '%s' "$answer"
}

# At second 0, so that nobody has to come back for a question.
model_prices() {
	local input output
	if read -r input output < <(saved "prices-$(prices_file)"); then
		EPHEMERAL_MODEL_INPUT_PRICE=${EPHEMERAL_MODEL_INPUT_PRICE:-$input}
		EPHEMERAL_MODEL_OUTPUT_PRICE=${EPHEMERAL_MODEL_OUTPUT_PRICE:-$output}
	fi
	if [ -z "${EPHEMERAL_MODEL_INPUT_PRICE:-}" ]; then ask_price EPHEMERAL_MODEL_INPUT_PRICE "Price of $EPHEMERAL_MODEL, input"; fi
	if [ -z "${EPHEMERAL_MODEL_OUTPUT_PRICE:-}" ]; then ask_price EPHEMERAL_MODEL_OUTPUT_PRICE "Price of $EPHEMERAL_MODEL, output"; fi
	saved "prices-$(prices_file)" "$EPHEMERAL_MODEL_INPUT_PRICE $EPHEMERAL_MODEL_OUTPUT_PRICE"
}

# https://api.openai.com/v1 -> openai; an address or a bare host name -> own
provider_name() {
	local host=${1#*://}
	host=${host%%/*}
	host=${host%:*}
	case $host in
	*[a-z]*.*)
		host=${host%.*}
		host=${host##*.}
		;;
	*) host=own ;;
	esac
	host=$(tr -c 'a-z0-9-' '-' <<<"${host,,}" | sed 's/^-*//; s/-*$//')
	case $host in '' | scripted) host=own ;; esac
	echo "$host"
}

# Private and loopback addresses are dialled by hosts only where the operator said so.
provider_is_private() {
	local host=${1#*://} address
	host=${host%%/*}
	host=${host%:*}
	host=${host#[}
	host=${host%]}
	while read -r address _; do
		case $address in
		127.* | 10.* | 192.168.* | 169.254.* | 172.1[6-9].* | 172.2[0-9].* | 172.3[01].* | 100.6[4-9].* | 100.[7-9][0-9].* | 100.1[01][0-9].* | 100.12[0-7].* | ::1 | f[cd]* | fe80*) return 0 ;;
		esac
	done < <(getent ahosts "$host" || true)
	return 1
}

set_real_model() {
	local name options
	name=$(provider_name "$EPHEMERAL_MODEL_BASE_URL")
	options=(--base-url "$EPHEMERAL_MODEL_BASE_URL" --api-key-file -)
	if [[ $EPHEMERAL_MODEL_BASE_URL == http:* ]] || provider_is_private "$EPHEMERAL_MODEL_BASE_URL"; then options+=(--any-address); fi
	must "adding the model provider" admin provider set "$name" "${options[@]}" <<<"$EPHEMERAL_MODEL_API_KEY"
	must "adding the model" admin model set "$name/$EPHEMERAL_MODEL" --upstream "$EPHEMERAL_MODEL" --default
	must "setting the model's price" admin price set "$name/$EPHEMERAL_MODEL" --input "$EPHEMERAL_MODEL_INPUT_PRICE" --output "$EPHEMERAL_MODEL_OUTPUT_PRICE"
	MODEL=$name/$EPHEMERAL_MODEL
}

# A script that plays a model, so that everything runs without an account anywhere. It listens on loopback, hence --any-address.
set_scripted_model() {
	must "adding the scripted provider" admin provider set scripted --base-url "http://127.0.0.1:$SCRIPTED_PORT/v1" --any-address \
		--api-key-file "$VAR/etc/scripted-token"
	must "adding scripted/auto" admin model set scripted/auto --default
	must "adding scripted/shell" admin model set scripted/shell
	must "pricing scripted/auto" admin price set scripted/auto --input 0.05 --output 0.40
	must "pricing scripted/shell" admin price set scripted/shell --input 0 --output 0
	MODEL=scripted/auto
}

# Changed variables count from the next start. A real model is set at each one, the scripted models only when they are not what was set
# last.
models_setup() {
	local stamp text="a script, not a model (README tells how to use a real one)"
	step model "setting prices"
	must "setting the prices" admin price set --run-fee 0 --compute "$COMPUTE"
	if [ -n "${EPHEMERAL_MODEL_BASE_URL:-}" ]; then
		set_real_model
		saved models "$MODEL"
		done_step "$MODEL at $EPHEMERAL_MODEL_BASE_URL, \$$EPHEMERAL_MODEL_INPUT_PRICE in, \$$EPHEMERAL_MODEL_OUTPUT_PRICE out per million tokens"
		return 0
	fi
	stamp="scripted $SCRIPTED_PORT"
	MODEL=scripted/auto
	case $(saved models) in
	"$stamp") ;;
	'' | 'scripted '*) set_scripted_model ;;
	*)
		text="default again, as EPHEMERAL_MODEL_BASE_URL is not set; it is $text"
		set_scripted_model
		;;
	esac
	saved models "$stamp"
	done_step "scripted/auto: $text"
}

# --- organization and key -----------------------------------------------------------------------------------------------------------

org_setup() {
	local org key log=$VAR/log/setup.log options=()
	step account "making"
	has_kvm || options+=(--allow-emulated)
	if [ -z "$(saved org)" ]; then
		org=$(admin org create quickstart "${options[@]}" --json 2>>"$log" | jq -r '.id // empty')
		if [ -z "$org" ]; then fail "the organization could not be made" "the log says why; then start again" "$log"; fi
		saved org "$org"
		must "adding credit" admin org credit "$org" "$CREDIT" --note quickstart --idempotency-key "quickstart-$org"
	fi
	if [ -z "$(saved api-key)" ] || ! member status >/dev/null 2>&1; then
		key=$(admin key create "$(saved org)" --role member --name quickstart --json 2>>"$log" | jq -r '.key // empty')
		if [ -z "$key" ]; then fail "the API key could not be made" "the log says why; then start again" "$log"; fi
		saved api-key "$key"
	fi
	must "logging the CLI in" cli_login
	write_env
	done_step "organization quickstart, \$$CREDIT credit, member key; CLI logged in; settings in var/env"
}

member() {
	EPHEMERAL_API_KEY=$(saved api-key) EPHEMERAL_URL=$URL "$BIN/ephemeral" "$@"
}

cli_login() {
	saved api-key | env -u EPHEMERAL_API_KEY EPHEMERAL_URL="$URL" "$BIN/ephemeral" login
}

write_env() {
	{
		echo '# written by deploy/quickstart; use it:  . var/env'
		printf 'export EPHEMERAL_URL=%q\n' "$URL"
		printf 'export EPHEMERAL_API_KEY=%q\n' "$(saved api-key)"
		printf 'export EPHEMERAL_OPERATOR_URL=%q\n' "$OPERATOR_URL"
		printf 'export EPHEMERAL_OPERATOR_KEY=%q\n' "$(saved operator-key)"
		printf 'case ":$PATH:" in *:%q:*) ;; *) export PATH=%q:"$PATH" ;; esac\n' "$BIN" "$BIN"
	} | write_secret "$VAR/env"
}
