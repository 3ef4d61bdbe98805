/*
 * Options that several commands share, and their parsers. Also opens the store, and finds the checkpoint that the
 * arguments name.
 */
#include "cli/output/output.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { OPT_JSON = 0x100, OPT_STEP, OPT_THREADS, OPT_STAGING, OPT_TAG };

/* ----------------------------------------------------------------------------------------------------- values */

bool cli_parse_u64(uint64_t *out, const char *text) {
    uint64_t value = 0;
    if (!*text) {
        return false;
    }
    for (; *text; text++) {
        if (*text < '0' || *text > '9' || __builtin_mul_overflow(value, 10u, &value) ||
            __builtin_add_overflow(value, (uint64_t)(*text - '0'), &value)) {
            return false;
        }
    }
    *out = value;
    return true;
}

/* Skips decimal digits. Returns whether there are any. */
static bool skip_digits(const char **at) {
    size_t count = strspn(*at, "0123456789");
    *at += count;
    return count > 0;
}

/* strtod would also take spaces, hexadecimal numbers and words. */
static bool is_decimal(const char *at) {
    at += *at == '+' || *at == '-';
    bool digits = skip_digits(&at);
    if (*at == '.') {
        at++;
        digits |= skip_digits(&at);
    }
    if (digits && (*at == 'e' || *at == 'E')) {
        at++;
        at += *at == '+' || *at == '-';
        digits = skip_digits(&at);
    }
    return digits && !*at;
}

bool cli_parse_double(double *out, const char *text) {
    if (!is_decimal(text)) {
        return false;
    }
    *out = strtod(text, NULL);
    return isfinite(*out);
}

bool cli_parse_size(uint64_t *out, const char *text) {
    static const char units[] = "KMGT";
    char digits[32];
    size_t length = strspn(text, "0123456789");
    const char *unit = text[length] ? strchr(units, text[length]) : NULL;
    if (length >= sizeof(digits) || (text[length] && (!unit || text[length + 1]))) {
        return false;
    }
    memcpy(digits, text, length);
    digits[length] = '\0';
    uint64_t factor = unit ? UINT64_C(1) << (10 * (unit - units + 1)) : 1;
    return cli_parse_u64(out, digits) && !__builtin_mul_overflow(*out, factor, out);
}

bool cli_parse_group(uint32_t *data, uint32_t *parity, const char *text) {
    char first[8] = "";
    uint64_t k = 0, m = 0;
    const char *plus = strchr(text, '+');
    if (plus && (size_t)(plus - text) < sizeof(first)) {
        memcpy(first, text, (size_t)(plus - text));
    }
    bool fine = cli_parse_u64(&k, first) && cli_parse_u64(&m, plus + 1) && k && k <= UINT32_MAX && m &&
                m <= UINT32_MAX;
    *data = fine ? (uint32_t)k : 0;
    *parity = fine ? (uint32_t)m : 0;
    return fine;
}

bool cli_parse_step(uint64_t *out, const char *text) {
    if (strcmp(text, "latest") == 0) {
        *out = CKD_LATEST;
        return true;
    }
    return cli_parse_u64(out, text) && *out <= INT64_MAX;
}

bool cli_parse_ref(cli_ref *out, const char *text) {
    const char *at = strrchr(text, '@');
    size_t length = at ? (size_t)(at - text) : 0;
    memset(out, 0, sizeof(*out));
    if (at == text) {
        size_t tag = strlen(text + 1);
        memcpy(out->tag, text + 1, tag <= CKD_RUN_MAX ? tag : 0);
        return out->tag[0] != '\0';
    }
    if (length > CKD_RUN_MAX) {
        return false;
    }
    memcpy(out->run, text, length);
    out->run[length] = '\0';
    return cli_parse_step(&out->step, at ? at + 1 : text);
}

static error_t add_ref(cli_refs *refs, const cli_ref *ref, struct argp_state *state) {
    cli_ref *grown = realloc(refs->items, (refs->count + 1) * sizeof(*grown));
    if (!grown) {
        argp_failure(state, CLI_FAILED, 0, "out of memory");
        return ENOMEM;
    }
    refs->items = grown;
    grown[refs->count++] = *ref;
    return 0;
}

error_t cli_refs_add(cli_refs *refs, const char *text, struct argp_state *state) {
    cli_ref ref;
    if (!cli_parse_ref(&ref, text) || !ref.run[0] || ref.step == CKD_LATEST) {
        argp_error(state, "name checkpoints as RUN@STEP, as in gpt@100, not '%s'", text);
    }
    return add_ref(refs, &ref, state);
}

error_t cli_refs_add_any(cli_refs *refs, const char *text, struct argp_state *state) {
    cli_ref ref;
    if (!cli_parse_ref(&ref, text) || !(ref.run[0] || ref.tag[0])) {
        argp_error(state, "name checkpoints as RUN@STEP, as in gpt@100, or as @TAG, not '%s'", text);
    }
    return add_ref(refs, &ref, state);
}

uint64_t cli_seconds(struct argp_state *state, const char *name, const char *text) {
    static const struct {
        char letter;
        uint64_t seconds;
    } units[] = {{'s', 1}, {'m', 60}, {'h', 3600}, {'d', 24 * 3600}};
    char digits[32];
    size_t length = strlen(text);
    uint64_t value;
    snprintf(digits, sizeof(digits), "%.*s", length ? (int)(length < 31 ? length - 1 : 31) : 0, text);
    for (size_t i = 0; length && i < sizeof(units) / sizeof(units[0]); i++) {
        if (text[length - 1] == units[i].letter && cli_parse_u64(&value, digits) &&
            !__builtin_mul_overflow(value, units[i].seconds, &value)) {
            return value;
        }
    }
    argp_error(state, "%s is a time such as 30s, 90m, 36h or 7d, not '%s'", name, text);
    return 0;
}

uint64_t cli_rate(struct argp_state *state, const char *text) {
    uint64_t bytes_per_s = 0;
    if (!cli_parse_size(&bytes_per_s, text) || !bytes_per_s) {
        argp_error(state, "--rate is a size such as 20M or 1G, not '%s'", text);
    }
    return bytes_per_s;
}

void cli_check_value(struct argp_state *state, ckd_status status, const ckd_error *err) {
    if (status != CKD_OK) {
        argp_error(state, "%s", err->message);
    }
}

/* ----------------------------------------------------------------------------------------------------- parsers */

static const struct argp_option common_options[] = {
    {"json", OPT_JSON, 0, 0, "Print one JSON object instead of text", -2},
    {"quiet", 'q', 0, 0, "Print nothing but errors (and what --json asks for)", -2},
    {"verbose", 'v', 0, 0, "Print more", -2},
    {0},
};

const char *cli_default_store(void) {
    const char *store = getenv("CKPTDELTA_STORE");
    return store && *store ? store : NULL;
}

static bool may_be_directory(const char *path) {
    struct stat st;
    size_t length = strlen(path);
    return (length > 0 && path[length - 1] == '/') || (stat(path, &st) == 0 && S_ISDIR(st.st_mode));
}

bool cli_take_store(cli_options *options, const char *argument) {
    if (options->store) {
        return false;
    }
    const char *otherwise = cli_default_store();
    bool takes = !otherwise || may_be_directory(argument);
    options->store = takes ? argument : otherwise;
    return takes;
}

error_t cli_take_run(cli_options *options, const char **run, const char *argument, struct argp_state *state) {
    if (cli_take_store(options, argument)) {
        return 0;
    }
    if (*run) {
        argp_error(state, "name one run, or none for all runs");
    }
    *run = argument;
    return 0;
}

static error_t parse_common(int key, char *arg, struct argp_state *state) {
    cli_options *options = state->input;
    switch (key) {
    case OPT_JSON:
        options->json = true;
        return 0;
    case 'q':
        options->quiet = true;
        return 0;
    case 'v':
        options->verbose++;
        return 0;
    case ARGP_KEY_ARG:
        return cli_take_store(options, arg) ? 0 : ARGP_ERR_UNKNOWN;
    case ARGP_KEY_END:
        options->store = options->store ? options->store : cli_default_store();
        if (!options->store) {
            argp_error(state, "name the STORE, a directory, or set CKPTDELTA_STORE to it");
        }
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

const struct argp cli_common_argp = {.options = common_options, .parser = parse_common};

static const struct argp_option threads_options[] = {
    {"threads", OPT_THREADS, "N", 0, "Work with N threads [default: one per core]", -2},
    {0},
};

static error_t parse_threads(int key, char *arg, struct argp_state *state) {
    if (key != OPT_THREADS) {
        return ARGP_ERR_UNKNOWN;
    }
    uint64_t threads = 0;
    if (!cli_parse_u64(&threads, arg) || threads < 1 || threads > 1024) {
        argp_error(state, "--threads is a number from 1 to 1024, not '%s'", arg);
    }
    ((cli_options *)state->input)->threads = (uint32_t)threads;
    return 0;
}

const struct argp cli_threads_argp = {.options = threads_options, .parser = parse_threads};

static const struct argp_option staging_options[] = {
    {"staging", OPT_STAGING, "SIZE", 0,
     "Memory to use, in addition to a little for each thread, such as 64M or 1G [default: 256M]", -2},
    {0},
};

static error_t parse_staging(int key, char *arg, struct argp_state *state) {
    if (key != OPT_STAGING) {
        return ARGP_ERR_UNKNOWN;
    }
    uint64_t *staging = &((cli_options *)state->input)->staging;
    if (!cli_parse_size(staging, arg) || *staging == 0) {
        argp_error(state, "--staging is a size such as 64M or 1G, not '%s'", arg);
    }
    return 0;
}

const struct argp cli_staging_argp = {.options = staging_options, .parser = parse_staging};

static const struct argp_option pick_options[] = {
    {"run", 'r', "RUN", 0, "The run [default: the only one of the store]", 1},
    {"step", OPT_STEP, "N|latest", 0, "The step of the checkpoint; latest is the newest committed", 1},
    {"tag", OPT_TAG, "TAG", 0, "Instead of these: the checkpoint that has this tag", 1},
    {0},
};

/* Merges the argument into the pick as if options had been given. */
static void merge_ref(cli_pick *pick, struct argp_state *state) {
    const cli_ref *ref = &pick->ref;
    if (pick->tag || pick->step_given || (pick->run && (ref->run[0] || ref->tag[0]))) {
        argp_error(state, "the checkpoint is named twice, by an argument and by options");
    }
    if (ref->tag[0]) {
        pick->tag = ref->tag;
        return;
    }
    pick->run = ref->run[0] ? ref->run : pick->run;
    pick->step = ref->step;
    pick->step_given = true;
}

static error_t parse_pick(int key, char *arg, struct argp_state *state) {
    cli_pick *pick = state->input;
    switch (key) {
    case ARGP_KEY_INIT:
        pick->step = CKD_LATEST;
        return 0;
    case 'r':
        pick->run = arg;
        return 0;
    case OPT_STEP:
        if (!cli_parse_step(&pick->step, arg)) {
            argp_error(state, "--step is a number or latest, not '%s'", arg);
        }
        pick->step_given = true;
        return 0;
    case OPT_TAG:
        pick->tag = arg;
        return 0;
    case ARGP_KEY_ARG:
        if (pick->ref_given) {
            return ARGP_ERR_UNKNOWN;
        }
        if (!cli_parse_ref(&pick->ref, arg)) {
            argp_error(state,
                       "name the checkpoint as RUN@STEP, as in gpt@100 or gpt@latest, or as @TAG, not '%s'",
                       arg);
        }
        pick->ref_given = true;
        return 0;
    case ARGP_KEY_END:
        if (pick->ref_given) {
            merge_ref(pick, state);
        }
        if (pick->tag && (pick->run || pick->step_given)) {
            argp_error(state, "--tag names a checkpoint by itself, without --run and --step");
        }
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

const struct argp cli_pick_argp = {.options = pick_options, .parser = parse_pick};

/* ------------------------------------------------------------------------------------------------------- store */

bool cli_prints_text(const cli_options *options) {
    return !options->json && !options->quiet;
}

int cli_fail_with_hint(const ckd_error *err, const cli_options *options) {
    int code = cli_fail(err);
    if (err->status == CKD_E_CORRUPT) {
        cli_note("'ckptdelta verify %s' lists all damage and the newest intact checkpoint", options->store);
    }
    return code;
}

ckd_status cli_open_store(ckd_store **out, const cli_options *options, ckd_open_mode mode, ckd_error *err) {
    ckd_store_options store_options = CKD_STORE_OPTIONS_INIT;
    store_options.threads = options->threads;
    store_options.on_message = cli_on_message;
    store_options.message_context = (void *)options;
    store_options.keep_trash = options->keeps_trash;
    return ckd_store_open(out, options->store, mode, &store_options, err);
}

ckd_status cli_load_begin(ckd_load **out, ckd_store *store, const ckd_id *checkpoint,
                          const cli_options *options, ckd_error *err) {
    ckd_load_options o = CKD_LOAD_OPTIONS_INIT;
    o.staging_bytes = options->staging;
    return ckd_load_begin_with(out, store, checkpoint, &o, err);
}

void cli_finish_deletion(ckd_store *store, bool now) {
    ckd_error why;
    cli_committed("the checkpoints are deleted");
    if (now && ckd_store_collect(NULL, store, NULL, &why) != CKD_OK) {
        cli_note("the checkpoints are deleted, but their files stay for now: %s", why.message);
    }
}

void cli_undo_add(cli_undo *u, const ckd_checkpoint *deleted) {
    if (u->count < CLI_UNDO_NAMES) {
        u->names[u->count] = cli_ref_text_of(deleted);
    }
    u->count++;
}

void cli_undo_print(const cli_undo *u, const char *store, uint64_t undo_s) {
    printf("to undo this within %s: ckptdelta trash ", cli_text_duration((double)undo_s).text);
    cli_print_word(stdout, store);
    fputs(" --restore", stdout);
    for (size_t i = 0; i < u->count && u->count <= CLI_UNDO_NAMES; i++) {
        printf(" %s", u->names[i].text);
    }
    puts(u->count <= CLI_UNDO_NAMES ? "" : " RUN@STEP...");
}

/* Formats "a (12 checkpoints, newest step 300), b (1 checkpoint, newest step 5)": as many as fit. */
static void describe_runs(char *to, size_t size, const ckd_checkpoint_list *list) {
    size_t used = 0;
    for (size_t i = 0, next; i < list->count; i = next) {
        for (next = i + 1; next < list->count && strcmp(list->items[next].run, list->items[i].run) == 0;) {
            next++;
        }
        char entry[CKD_RUN_MAX + 80];
        int length = snprintf(entry, sizeof(entry), "%s%s (%zu checkpoint%s, newest step %llu)",
                              i ? ", " : "", list->items[i].run, next - i, cli_plural(next - i),
                              (unsigned long long)list->items[next - 1].step);
        if (used + (size_t)length + 6 > size) {
            snprintf(to + used, size - used, ", ...");
            return;
        }
        memcpy(to + used, entry, (size_t)length + 1);
        used += (size_t)length;
    }
}

/* Returns the name of the only run, or an error that lists all runs. */
static ckd_status only_run(char run[CKD_RUN_MAX + 1], ckd_store *store, ckd_error *err) {
    ckd_checkpoint_list *list;
    ckd_status status = ckd_store_list(&list, store, NULL, err);
    if (status != CKD_OK) {
        return status;
    }
    if (list->count == 0) {
        status = cli_error(err, CKD_E_NOT_FOUND, "the store has no checkpoints yet");
    } else if (strcmp(list->items[0].run, list->items[list->count - 1].run) != 0) {
        char runs[400];
        describe_runs(runs, sizeof(runs), list);
        status = cli_error(err, CKD_E_INVALID, "the store has several runs, choose one with --run: %s", runs);
    } else {
        memcpy(run, list->items[0].run, CKD_RUN_MAX + 1);
    }
    ckd_checkpoint_list_free(list);
    return status;
}

ckd_status cli_find(ckd_checkpoint *out, ckd_store *store, const char *run, uint64_t step, ckd_error *err) {
    char only[CKD_RUN_MAX + 1];
    if (!run || !*run) {
        ckd_status status = only_run(only, store, err);
        if (status != CKD_OK) {
            return status;
        }
        run = only;
    }
    return ckd_store_find(out, store, run, step, err);
}

ckd_status cli_check_run(ckd_store *store, const char *run, ckd_error *err) {
    ckd_checkpoint newest;
    return run ? ckd_store_find(&newest, store, run, CKD_LATEST, err) : CKD_OK;
}

bool cli_pick_is_latest(const cli_pick *pick) {
    return !pick->tag && (!pick->step_given || pick->step == CKD_LATEST);
}

ckd_status cli_find_pick(ckd_checkpoint *out, ckd_store *store, const cli_pick *pick, ckd_error *err) {
    return pick->tag ? ckd_store_find_tag(out, store, pick->tag, err)
                     : cli_find(out, store, pick->run, pick->step, err);
}

ckd_status cli_find_healthy(ckd_checkpoint *out, ckd_store *store, const cli_pick *pick, ckd_error *err) {
    ckd_status status = cli_find_pick(out, store, pick, err);
    return status == CKD_OK && cli_pick_is_latest(pick) ? ckd_store_healthy(out, store, out, err) : status;
}

ckd_status cli_find_ref(ckd_checkpoint *out, ckd_store *store, const cli_ref *ref, const char *run,
                        ckd_error *err) {
    return ref->tag[0] ? ckd_store_find_tag(out, store, ref->tag, err)
                       : cli_find(out, store, ref->run[0] ? ref->run : run, ref->step, err);
}
