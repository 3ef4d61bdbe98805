#!/bin/sh
# Prints what `ckptdelta help` and `ckptdelta help COMMAND` say as records, one a line, fields separated by tabs:
# help-records.sh COMMAND. Manual pages and completions are made from them (scripts/man.awk, scripts/completions.awk).
#
#   version  TEXT                         of the program
#   command  NAME SUMMARY                 begins a command; NAME is empty for the program itself
#   alias    NAME COMMAND                 another name of a command
#   usage    TEXT                         arguments, without the command's name
#   text     TEXT                         a paragraph of the description
#   group    TEXT                         the heading of the options that follow; empty: of no kind
#   option   SHORT LONG ARGUMENT TEXT     "-q" or "", "--quiet" or "", "FILE" or "", what it does
#   note     TEXT                         a paragraph after the options
#   verbatim TEXT                         a line of either, as it is
#   example  TEXT                         the same, of the examples
set -eu
program=$1
# One line for each paragraph and option, whatever the terminal or the user's settings.
export ARGP_HELP_FMT=rmargin=30000 LC_ALL=C

version=$("$program" --version)
printf 'version\t%s\n' "${version##* }"
general=$("$program" help)
printf '%s\n' "$general" | awk '
    NR == 1 { sub(/^Usage: ckptdelta */, ""); print "command\t\tdelta-compressed checkpoint storage for training runs"; print "usage\t" $0; next }
    /^Commands:$/ { commands = 1; if (text != "") print "text\t" text; text = ""; next }
    commands && /^$/ { commands = 0; rest = 1 }
    commands { next }
    /^  / { text = ""; print "example\t" substr($0, 3); next } # without the line that introduces it
    /^$/ { if (text != "") print kind "\t" text; text = ""; next }
    /^Aliases: / {
        count = split(substr($0, 10), pairs, ", ")
        for (i = 1; i <= count; i++) { split(pairs[i], words, " for "); print "alias\t" words[1] "\t" words[2] }
    }
    { kind = rest ? "note" : "text"; text = text (text == "" ? "" : " ") $0 }
    END { if (text != "") print kind "\t" text }'

printf '%s\n' "$general" | awk '/^Commands:$/ { on = 1; next } /^$/ { on = 0 } on { print $1 }' |
    while read -r name; do
        [ "$name" = help ] && continue
        summary=$(printf '%s\n' "$general" | sed -n "s/^  $name  *//p" | head -n 1)
        printf 'command\t%s\t%s\n' "$name" "$summary"
        help=$("$program" help "$name")
        printf '%s\n' "$help" | awk '
            function flush() { if (text != "") print (options ? "note" : "text") "\t" text; text = "" }
            function put() { if (option != "") print option "\t" what; option = "" }
            function add(more) { what = what (what == "" ? "" : " ") more }
            /^Usage: / || /^  or: / {
                sub(/^(Usage|  or): *ckptdelta [^ ]* */, ""); print "usage\t" $0; next
            }
            /^Examples?:$/ { put(); flush(); examples = 1; next }
            examples { sub(/^  /, ""); print "example\t" $0; next }
            /^ +-[-a-zA-Z?]/ {
                put(); flush(); options = 1
                sub(/^ +/, "")
                at = match($0, /  +[^ ]/)
                what = at ? substr($0, at + RLENGTH - 1) : ""
                head = at ? substr($0, 1, at - 1) : $0
                short = ""; long = ""; argument = ""
                if (match(head, /^-[a-zA-Z?]/)) { short = substr(head, 1, 2); head = substr(head, 3) }
                sub(/^, /, "", head)
                if (match(head, /^--[a-z0-9-]+/)) { long = substr(head, 1, RLENGTH); head = substr(head, RLENGTH + 1) }
                sub(/^[ =]/, "", head)
                argument = head
                option = "option\t" short "\t" long "\t" argument
                next
            }
            /^ [^ ]/ { put(); sub(/^ /, ""); sub(/:$/, ""); print "group\t" $0; next }
            option != "" && /^ +[^ ]/ { sub(/^ +/, ""); add($0); next }
            option == "" && /^  / { flush(); print "verbatim\t" substr($0, 3); next }
            /^$/ { if (option != "") { put(); print "group\t" } flush(); next }
            /^Mandatory or optional arguments to long options/ { next }
            { put(); text = text (text == "" ? "" : " ") $0 }
            END { put(); flush() }'
    done
