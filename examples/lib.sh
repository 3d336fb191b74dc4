# shellcheck shell=bash
# What the scripts of the examples share: their flags, their env file, and how a command is shown
# or run. Sourced, never run by itself.

dry_run=false

fail() {
    echo "${0##*/}: $*" >&2
    exit 2
}

# Take --dry-run and --help out of the arguments; the rest is left in `words`.
read_flags() {
    words=()
    local word
    for word in "$@"; do
        case $word in
            --dry-run) dry_run=true ;;
            -h | --help) usage; exit 0 ;;
            -*) fail "unknown option $word (see --help)" ;;
            *) words+=("$word") ;;
        esac
    done
}

# Read the settings: the file that ENV_FILE names, else cluster.env beside the script.
read_settings() {
    local file=${ENV_FILE:-$1/cluster.env}
    [[ -r $file ]] || fail "cannot read $file; name another file in ENV_FILE"
    # shellcheck disable=SC1090
    source "$file"
}

# Each of these variables must have been set by then.
need() {
    local name
    for name in "$@"; do
        [[ -n ${!name:-} ]] || fail "$name is not set: write it into the env file"
    done
}

# A command as one line that a shell reads back as the same words.
show() {
    local word line=""
    for word in "$@"; do
        [[ $word =~ ^[A-Za-z0-9_@%+=:,./-]+$ ]] || word=${word@Q}
        line+="$word "
    done
    echo "${line% }"
}

# Become the command, or print it.
launch() {
    if $dry_run; then
        show "$@"
    else
        exec "$@"
    fi
}
