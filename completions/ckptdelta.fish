# fish completion of ckptdelta: commands, options, and the names in a store. The tables are those of --help.

# Names of the kind $argv[1] in the store that the command line names, or else in $CKPTDELTA_STORE.
function __ckptdelta_names
    set -l words (commandline -opc)
    set -l store
    set -l run
    set -l before
    for word in $words[3..-1]
        set word (string replace -r '^~/' "$HOME/" -- $word)
        if contains -- "$before" --run -r
            set run --run=$word
        else if string match -q -- '--run=*' $word
            set run $word
        else if not set -q store[1]; and test -e "$word/data/store"
            set store $word
        end
        set before $word
    end
    set -q store[1]; or set store $CKPTDELTA_STORE
    test $argv[1] = steps; and echo latest
    if set -q store[1]
        set -l program (string replace -r '^~/' "$HOME/" -- $words[1])
        type -q $program; or return
        $program complete $store[1] $argv[1] $run 2>/dev/null
    end
end

complete -c ckptdelta -n __fish_use_subcommand -f
complete -c ckptdelta -n __fish_use_subcommand -a help -d 'explain a command'
@TABLES@
