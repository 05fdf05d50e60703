# shellcheck shell=bash
# Read by tpu_vm.sh and queued_resources.sh.

# gcloud_state FORMAT COMMAND...: what gcloud says of a slice; nothing where there is none, UNKNOWN where gcloud fails.
gcloud_state() {
    local format=$1 problem
    shift
    problem=$(mktemp)
    if ! "$@" --format="$format" 2>"$problem" && ! grep -qi 'not_found\|not found' "$problem"; then
        cat "$problem" >&2
        echo UNKNOWN
    fi
    rm -f "$problem"
}
