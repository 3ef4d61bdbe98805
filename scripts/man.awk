# Makes manual pages of the records of scripts/help-records.sh: awk -v folder=FOLDER -f man.awk RECORDS RECORDS
# Writes FOLDER/ckptdelta.1 and FOLDER/ckptdelta-COMMAND.1 for each command. The records are read twice: the first
# time for what stands on several pages.
BEGIN { FS = "\t" }

# Text as it is: what roff would take for a request or for typography is escaped.
function roff(text) {
    gsub(/\\/, "\\e", text)
    gsub(/-/, "\\-", text)
    gsub(/'/, "\\(aq", text)
    gsub(/`/, "\\(ga", text)
    gsub(/"/, "\\(dq", text)
    gsub(/\^/, "\\(ha", text)
    gsub(/~/, "\\(ti", text)
    return (text ~ /^\./ ? "\\&" : "") text
}

function put(line) { print line > page }

# Begins a section. Within the section that was begun last: a paragraph.
function section(name) {
    if (as_it_is)
        put(".fi")
    as_it_is = 0
    if (section_now != name)
        put(".SH \"" name "\"")
    else if (name != "OPTIONS")
        put(".PP")
    section_now = name
}

# A line below the one before, with all its blanks.
function line(text) {
    if (!as_it_is)
        put(".nf")
    as_it_is = 1
    put(roff(text))
}

function finish() {
    if (page == "")
        return
    if (command == "") {
        section("COMMANDS")
        for (i = 1; i <= count; i++) {
            put(".TP")
            put(".BR " roff("ckptdelta-" commands[i]) " (1)")
            put(roff(summaries[i]))
        }
    }
    section("EXIT STATUS")
    put(exit_status)
    section("SEE ALSO")
    if (command != "")
        put(".BR ckptdelta (1)")
    put(command == "" ? "The" : "and the")
    put("file docs/cli.md in the folder share/doc/ckptdelta of the installation: what scripts may rely on.")
    close(page)
}

FNR == NR {
    if ($1 == "version")
        version = $2
    else if ($1 == "command" && $2 != "") {
        commands[++count] = $2
        summaries[count] = $3
    } else if ($1 == "note" && $2 ~ /^Exit status: /)
        exit_status = roff(substr($2, 14))
    next
}

$1 == "command" {
    finish()
    command = $2
    name = "ckptdelta" (command == "" ? "" : "-" command)
    page = folder "/" name ".1"
    section_now = group = ""
    grouped = 0
    put(".\\\" Made from the output of --help.")
    put(".TH " roff(toupper(name)) " 1 \"\" \"ckptdelta " version "\" \"ckptdelta\"")
    section("NAME")
    put(roff(name) " \\- " roff($3))
}

$1 == "usage" {
    section("SYNOPSIS")
    put(".B " roff("ckptdelta" (command == "" ? "" : " " command)))
    put(roff($2))
}

$1 == "text" {
    section("DESCRIPTION")
    put(roff($2))
}

# A heading is written with the first option below it.
$1 == "group" { group = $2 == "" && grouped ? "Other options" : $2 }

$1 == "option" {
    section("OPTIONS")
    if (group != "") {
        put(".SS \"" roff(group) "\"")
        grouped = 1
        group = ""
    }
    put(".TP")
    head = ($2 == "" ? "" : "\\fB" roff($2) "\\fR") ($2 != "" && $3 != "" ? ", " : "")
    head = head ($3 == "" ? "" : "\\fB" roff($3) "\\fR")
    between = $3 == "" ? " " : $4 ~ /^\[=/ ? "" : "="
    put(head ($4 == "" ? "" : between "\\fI" roff($4) "\\fR"))
    put(roff($5))
}

# What is said after an example is about it.
$1 == "note" && $2 !~ /^Exit status: / {
    section(section_now == "EXAMPLES" ? "EXAMPLES" : "NOTES")
    put(roff($2))
}

$1 == "verbatim" {
    if (!as_it_is)
        put(".PP")
    line($2)
}

$1 == "example" {
    if (section_now != "EXAMPLES")
        section("EXAMPLES")
    line($2)
}

END { finish() }
