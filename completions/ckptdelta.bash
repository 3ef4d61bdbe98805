# bash completion of ckptdelta: commands, options, and the names in a store. The tables are those of --help.
@TABLES@

# Splits the command line at blanks into the caller's `words`. (COMP_WORDS is split at = and @ as well.) Finds out what of it
# matters: `command`, its `first` argument, the `store`, the `run`, and in `pending` an option that waits for its argument.
_ckptdelta_parse() {
    local line=${COMP_LINE:0:COMP_POINT} word i
    read -ra words <<<"$line"
    [[ $line == *[[:space:]] ]] && words+=('')
    command=$(_ckptdelta_alias "${words[1]-}")
    for ((i = 2; i < ${#words[@]} - 1; i++)); do
        word=${words[i]}
        if [[ -n $pending ]]; then
            [[ $pending == --run || $pending == -r ]] && run=$word
            pending=
        elif [[ $word == --*=* ]]; then
            [[ $word == --run=* ]] && run=${word#--run=}
        elif [[ $word == -* ]]; then
            [[ -n $(_ckptdelta_kind "$command $word") ]] && pending=$word
        elif [[ -z $first ]]; then
            first=${word/#\~\//$HOME/}
        fi
    done
    store=$first
    [[ -d $store ]] || store=${CKPTDELTA_STORE-}
}

# Names of one kind that begin with $2.
_ckptdelta_names() {
    local prefix=$2
    case $1 in
        files) compgen -f -- "$prefix" ;;
        folders) compgen -d -- "$prefix" ;;
        runs | steps | tags | checkpoints)
            [[ $1 == steps ]] && compgen -W latest -- "$prefix"
            [[ -n $store ]] || return
            compgen -W "$("${words[0]/#\~\//$HOME/}" complete "$store" "$1" ${run:+"--run=$run"} 2>/dev/null)" -- "$prefix"
            ;;
    esac
}

# COMPREPLY becomes the names of the kinds $2 ... that begin with $1.
_ckptdelta_reply() {
    local prefix=$1 kind names
    shift
    for kind; do
        mapfile -t names < <(_ckptdelta_names "$kind" "$prefix")
        COMPREPLY+=("${names[@]}")
    done
    # For files alone: readline would put a backslash before the @ of other names.
    case "$*" in files | folders) compopt -o filenames 2>/dev/null ;; esac
}

_ckptdelta() {
    local words=() command='' first='' store='' run='' pending='' current option kind i
    COMPREPLY=()
    _ckptdelta_parse
    current=${words[${#words[@]} - 1]}
    if [[ -n $pending ]]; then
        _ckptdelta_reply "$current" "$(_ckptdelta_kind "$command $pending")"
    elif ((${#words[@]} == 2)) || { [[ $command == help ]] && ((${#words[@]} == 3)); }; then
        mapfile -t COMPREPLY < <(compgen -W "$_ckptdelta_commands --help --version" -- "$current")
    elif [[ $current == --*=* ]]; then
        option=${current%%=*}
        current=${current#*=}
        _ckptdelta_reply "$current" "$(_ckptdelta_kind "$command $option")"
        # readline has split at the equals sign, unless the user has taken that out of COMP_WORDBREAKS.
        [[ $COMP_WORDBREAKS == *=* ]] || COMPREPLY=("${COMPREPLY[@]/#/$option=}")
    elif [[ $current == -* ]]; then
        mapfile -t COMPREPLY < <(compgen -W "$(_ckptdelta_options "$command")" -- "$current")
    elif [[ -n $first ]]; then
        _ckptdelta_reply "$current" $(_ckptdelta_behind "$command")
    elif [[ -n $store ]]; then
        _ckptdelta_reply "$current" folders $(_ckptdelta_behind "$command")
    else
        _ckptdelta_reply "$current" folders
    fi
    # The same with the @ of RUN@STEP: only what comes after it is replaced.
    if [[ $current == *@* && $COMP_WORDBREAKS == *@* ]]; then
        for i in "${!COMPREPLY[@]}"; do
            COMPREPLY[i]=${COMPREPLY[i]#"${current%@*}@"}
        done
    fi
}

complete -F _ckptdelta ckptdelta
