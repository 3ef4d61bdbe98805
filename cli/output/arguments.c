/* Finds unknown options before argp does, so that the message can suggest the option that was meant. */
#include "cli/output/output.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ------------------------------------------------------------------------------------------------ near misses */

enum { LONGEST = 40 }; /* no command or option is longer, so longer words are not misspellings */

static size_t smaller(size_t a, size_t b) {
    return a < b ? a : b;
}

/*
 * Damerau-Levenshtein distance (optimal string alignment: swapped letters are not edited further). Both are at most
 * LONGEST long.
 */
static size_t distance(const char *a, const char *b) {
    size_t rows[3][LONGEST + 1]; /* rows for three letters of a: two before, one before, this one */
    size_t *before = rows[0], *above = rows[1], *row = rows[2], width = strlen(b);
    for (size_t j = 0; j <= width; j++) {
        above[j] = j;
    }
    for (size_t i = 1; a[i - 1]; i++) {
        row[0] = i;
        for (size_t j = 1; j <= width; j++) {
            size_t change = above[j - 1] + (a[i - 1] != b[j - 1]);
            row[j] = smaller(change, smaller(above[j], row[j - 1]) + 1);
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
                row[j] = smaller(row[j], before[j - 2] + 1);
            }
        }
        size_t *reused = before;
        before = above;
        above = row;
        row = reused;
    }
    return above[width];
}

const char *cli_nearest(const char *word, const char *const *candidates, size_t count) {
    size_t length = strlen(word);
    size_t limit = length < 3 ? 0 : length < 6 ? 1 : 2;
    const char *nearest = NULL;
    for (size_t i = 0; i < count && length <= LONGEST; i++) {
        size_t away = strlen(candidates[i]) <= LONGEST ? distance(word, candidates[i]) : LONGEST;
        if (away <= limit) {
            nearest = candidates[i];
            limit = away - (away > 0);
        }
    }
    return nearest;
}

/* ---------------------------------------------------------------------------------------------------- options */

enum { OPTIONS_MAX = 128 };

typedef struct known_options {
    const struct argp_option *items[OPTIONS_MAX];
    size_t count;
} known_options;

static const struct argp_option own_options[] = {
    {"help", '?', 0, 0, "", 0}, {"usage", 1, 0, 0, "", 0}, {"version", 'V', 0, 0, "", 0}, {0}};

static void add_options(known_options *known, const struct argp_option *o) {
    for (; o && (o->name || o->key || o->doc || o->group); o++) {
        if ((o->name || o->key) && known->count < OPTIONS_MAX) {
            known->items[known->count++] = o;
        }
    }
}

/* Collects options. Parsers may have children; the children have none. */
static known_options collect(const struct argp *argp) {
    known_options known = {.count = 0};
    add_options(&known, own_options);
    add_options(&known, argp->options);
    for (const struct argp_child *c = argp->children; c && c->argp; c++) {
        add_options(&known, c->argp->options);
        for (const struct argp_child *d = c->argp->children; d && d->argp; d++) {
            add_options(&known, d->argp->options);
        }
    }
    return known;
}

/* Finds the option of this name, or the first that starts with it; getopt handles ambiguous abbreviations. */
static const struct argp_option *find_long(const known_options *known, const char *name, size_t length) {
    const struct argp_option *begun = NULL;
    for (size_t i = 0; i < known->count; i++) {
        const struct argp_option *o = known->items[i];
        if (o->name && strncmp(o->name, name, length) == 0) {
            if (!o->name[length]) {
                return o;
            }
            begun = begun ? begun : o;
        }
    }
    return begun;
}

/* Does the last letter of "-vo" take the next word as its value? */
static bool takes_next(const known_options *known, const char *letters) {
    for (; *letters; letters++) {
        for (size_t i = 0; i < known->count; i++) {
            const struct argp_option *o = known->items[i];
            if (o->key == *letters && o->arg && !(o->flags & OPTION_ARG_OPTIONAL)) {
                return !letters[1];
            }
        }
    }
    return false;
}

static void refuse(const struct argp *argp, const known_options *known, const char *command, const char *name,
                   size_t length) {
    const char *names[OPTIONS_MAX];
    char word[LONGEST + 1];
    size_t count = 0;
    for (size_t i = 0; i < known->count; i++) {
        if (known->items[i]->name) {
            names[count++] = known->items[i]->name;
        }
    }
    snprintf(word, sizeof(word), "%.*s", (int)smaller(length, LONGEST), name);
    const char *nearest = length <= LONGEST ? cli_nearest(word, names, count) : NULL;
    fprintf(stderr, "%s: there is no option '--%.*s'", command, (int)smaller(length, 200), name);
    fprintf(stderr, nearest ? "; did you mean '--%s'?\n" : "\n", nearest);
    argp_help(argp, stderr, ARGP_HELP_SEE, (char *)command);
    exit(argp_err_exit_status);
}

/*
 * Returns the first unknown option; NULL: there is none. Errors must be JSON wherever --json stands, so all arguments
 * are scanned first.
 */
static const char *check_options(const known_options *known, int argc, char **argv) {
    const char *unknown = NULL;
    for (int i = 1; i < argc && strcmp(argv[i], "--") != 0; i++) {
        if (argv[i][0] != '-' || !argv[i][1]) {
            continue;
        }
        if (argv[i][1] != '-') {
            i += takes_next(known, argv[i] + 1);
            continue;
        }
        const char *name = argv[i] + 2;
        size_t length = strcspn(name, "=");
        const struct argp_option *o = find_long(known, name, length);
        unknown = o || unknown ? unknown : name;
        if (o && o->name && strcmp(o->name, "json") == 0) {
            cli_errors_as_json();
        }
        i += o && o->arg && !(o->flags & OPTION_ARG_OPTIONAL) && !name[length];
    }
    return unknown;
}

void cli_parse_arguments(const struct argp *argp, int argc, char **argv, void *input) {
    known_options known = collect(argp);
    const char *unknown = check_options(&known, argc, argv);
    if (unknown) {
        refuse(argp, &known, argv[0], unknown, strcspn(unknown, "="));
    }
    argp_parse(argp, argc, argv, 0, NULL, input);
}
