# Fills in a completion script of completions/: awk -v shell=bash|zsh|fish -f completions.awk RECORDS TEMPLATE
# The records are those of scripts/help-records.sh. They replace the template's line @TABLES@.
BEGIN { FS = "\t" }

# What an option's argument names: runs, steps, checkpoints, tags, files, or "other", for which nothing is offered. Empty:
# it takes none, or only behind an equals sign.
function kind_of(option, argument) {
    if (argument == "" || argument ~ /^\[=/)
        return ""
    if (argument == "RUN")
        return "runs"
    if (argument ~ /latest/)
        return "steps"
    if (argument ~ /RUN@STEP/)
        return "checkpoints"
    if (argument == "TAG")
        return "tags"
    return argument ~ /^(FILE|DIR|FOLDER|PATH)/ ? "files" : "other"
}

# What may stand behind the store.
function kinds_behind(usage, word, kinds, ordered, all, n, i) {
    gsub(/\[OPTION\.\.\.\]|[][]|\.\.\./, "", usage)
    n = split(usage, word, " ")
    for (i = 2; i <= n; i++) {
        if (word[i] ~ /STEP/ || word[i] ~ /^[AB]$/)
            kinds["checkpoints"]
        else if (word[i] == "RUN")
            kinds["runs"]
        else if (word[i] == "TAG")
            kinds["tags"]
        else if (word[i] ~ /^(FILE|SOURCE|DESTINATION|OLD|NEW)/)
            kinds[word[i] == "OLD" ? "runs" : word[i] == "NEW" ? "other" : "files"]
    }
    n = split("checkpoints runs tags files other", ordered, " ")
    for (i = 1; i <= n; i++)
        if (ordered[i] in kinds)
            all = all (all == "" ? "" : " ") ordered[i]
    return all
}

function shell_quoted(text) {
    gsub(/'/, shell == "fish" ? "\\'" : "'\\''", text)
    return "'" text "'"
}

# The first words, for shells that show what an option does.
function short_text(text) {
    sub(/[.;] .*$/, "", text)
    return length(text) > 70 ? substr(text, 1, 67) "..." : text
}

FNR == NR && $1 == "alias" { alias_of[$2] = $3; aliases = aliases " " $2 }

FNR == NR && $1 == "command" {
    command = $2
    if (command != "") {
        commands[++count] = command
        summary[command] = $3
    }
}

FNR == NR && $1 == "usage" && command != "" { behind[command] = behind[command] " " kinds_behind($2) }

FNR == NR && $1 == "option" && $3 != "" {
    options[command] = options[command] (options[command] == "" ? "" : " ") $3
    ++option_count[command]
    option[command, option_count[command]] = $3
    text[command, option_count[command]] = short_text($5)
    short[command, option_count[command]] = substr($2, 2)
    kind = kind_of($3, $4)
    value[command, option_count[command]] = kind
    if (kind != "")
        pairs[kind] = pairs[kind] (pairs[kind] == "" ? "" : " | ") "'" command " " $3 "'" \
            ($2 == "" ? "" : " | '" command " " $2 "'")
}

FNR == NR { next }

$0 != "@TABLES@" {
    print
    next
}

function print_kinds(kinds, n, i) {
    n = split("runs steps checkpoints tags files other", kinds, " ")
    print "_ckptdelta_kind() {"
    print "    case $1 in"
    for (i = 1; i <= n; i++)
        if (kinds[i] in pairs)
            print "        " pairs[kinds[i]] ") echo " kinds[i] " ;;"
    print "    esac"
    print "}"
}

function print_behind(i) {
    print "_ckptdelta_behind() {"
    print "    case $1 in"
    for (i = 1; i <= count; i++) {
        sub(/^ */, "", behind[commands[i]])
        if (behind[commands[i]] != "")
            print "        " commands[i] ") echo " behind[commands[i]] " ;;"
    }
    print "    esac"
    print "}"
}

function print_aliases(alias) {
    print "_ckptdelta_alias() {"
    print "    case $1 in"
    for (alias in alias_of)
        print "        " alias ") echo " alias_of[alias] " ;;"
    print "        *) echo \"$1\" ;;"
    print "    esac"
    print "}"
}

function print_bash(i, all) {
    for (i = 1; i <= count; i++)
        all = all " " commands[i]
    print "_ckptdelta_commands='help" all aliases "'"
    print "_ckptdelta_options() {"
    print "    case $1 in"
    for (i = 1; i <= count; i++)
        print "        " commands[i] ") echo '" options[commands[i]] "' ;;"
    print "    esac"
    print "}"
}

function print_zsh(i, j, c) {
    print "_ckptdelta_commands=("
    print "    'help:explain a command'"
    for (i = 1; i <= count; i++)
        print "    " shell_quoted(commands[i] ":" summary[commands[i]])
    for (c in alias_of)
        print "    '" c ":" alias_of[c] "'"
    print ")"
    print "_ckptdelta_options() {"
    print "    case $1 in"
    for (i = 1; i <= count; i++) {
        print "        " commands[i] ")"
        print "            reply=("
        for (j = 1; j <= option_count[commands[i]]; j++)
            print "                " shell_quoted(option[commands[i], j] ":" text[commands[i], j])
        print "            ) ;;"
    }
    print "    esac"
    print "}"
}

function print_fish(i, j, c, n, k, line, names, seen) {
    for (i = 1; i <= count; i++) {
        c = commands[i]
        names = c
        for (k in alias_of)
            if (alias_of[k] == c)
                names = names " " k
        print "complete -c ckptdelta -n __fish_use_subcommand -a '" names "' -d " shell_quoted(summary[c])
        seen = "'__fish_seen_subcommand_from " names "'"
        for (j = 1; j <= option_count[c]; j++) {
            line = "complete -c ckptdelta -n " seen " -l " substr(option[c, j], 3)
            # fish takes letters only for short options; -? is not worth it.
            if (short[c, j] ~ /^[a-zA-Z]$/)
                line = line " -s " short[c, j]
            k = value[c, j]
            if (k == "files")
                line = line " -r -F"
            else if (k == "other")
                line = line " -x"
            else if (k != "")
                line = line " -x -a '(__ckptdelta_names " k ")'"
            print line " -d " shell_quoted(text[c, j])
        }
        n = split(behind[c], line_kinds, " ")
        for (j = 1; j <= n; j++)
            if (line_kinds[j] == "files")
                print "complete -c ckptdelta -n " seen " -F"
            else if (line_kinds[j] != "other")
                print "complete -c ckptdelta -n " seen " -a '(__ckptdelta_names " line_kinds[j] ")'"
    }
}

{
    if (shell == "fish")
        print_fish()
    else {
        if (shell == "zsh")
            print_zsh()
        else
            print_bash()
        print_kinds()
        print_behind()
        print_aliases()
    }
}
