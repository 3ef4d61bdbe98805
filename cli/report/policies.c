/* The --keep options that make up a retention policy, and a policy in words. */
#include "cli/report/report.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>

#include "cli/output/output.h"

enum {
    OPT_LAST = 0x300,
    OPT_EVERY,
    OPT_FIRST,
    OPT_BEST,
    OPT_HIGHEST,
    OPT_NEW,
    OPT_WITHIN,
    OPT_DAILY,
    OPT_WEEKLY,
    OPT_MONTHLY,
    OPT_TAG
};

static const struct argp_option options_table[] = {
    {"run", 'r', "RUN", 0, "Only this run [default: all runs, each by itself]", 1},
    {"keep-last", OPT_LAST, "N", 0, "Keep the N newest steps", 2},
    {"keep-every", OPT_EVERY, "K", 0, "Keep steps that are multiples of K", 2},
    {"keep-first", OPT_FIRST, 0, 0, "Keep the first step", 2},
    {"keep-best", OPT_BEST, "N", 0, "Keep the N with the lowest metric (save --metric)", 2},
    {"highest-is-best", OPT_HIGHEST, 0, 0, "With --keep-best: keep the highest instead", 2},
    {"keep-newer", OPT_NEW, "TIME", 0, "Keep what was saved this long ago or less: 90m, 36h, 7d", 2},
    {"keep-within", OPT_WITHIN, "TIME", 0, "Keep what was saved at most this long before the newest step", 2},
    {"keep-daily", OPT_DAILY, "N", 0, "Keep the newest step of each of the N newest days with a save (UTC)",
     2},
    {"keep-weekly", OPT_WEEKLY, "N", 0, "The same for weeks, which begin on Monday", 2},
    {"keep-monthly", OPT_MONTHLY, "N", 0, "The same for months", 2},
    {"keep-tag", OPT_TAG, "TAG", 0,
     "Keep what has this tag. Tagged checkpoints are always kept, so this is only needed if there is no other rule",
     2},
    {0},
};

static uint64_t number(struct argp_state *state, const char *name, const char *text, uint64_t max) {
    uint64_t value;
    if (!cli_parse_u64(&value, text) || value < 1 || value > max) {
        argp_error(state, "%s is a number from 1 to %" PRIu64 ", not '%s'", name, max, text);
    }
    return value;
}

/* A period of 0 would count as an option that was not given, so it is refused. */
static uint64_t period(struct argp_state *state, const char *name, const char *text) {
    uint64_t seconds = cli_seconds(state, name, text);
    if (seconds == 0) {
        argp_error(state, "%s is a time from 1s, not '%s'", name, text);
    }
    return seconds;
}

static error_t parse(int key, char *arg, struct argp_state *state) {
    ckd_policy *p = state->input;
    switch (key) {
    case 'r':
        p->run = arg;
        return 0;
    case OPT_LAST:
        p->keep_last = (uint32_t)number(state, "--keep-last", arg, UINT32_MAX);
        return 0;
    case OPT_EVERY:
        p->keep_every = number(state, "--keep-every", arg, INT64_MAX);
        return 0;
    case OPT_FIRST:
        p->keep_first = 1;
        return 0;
    case OPT_BEST:
        p->keep_best = (uint32_t)number(state, "--keep-best", arg, UINT32_MAX);
        return 0;
    case OPT_HIGHEST:
        p->highest_is_best = 1;
        return 0;
    case OPT_NEW:
        p->keep_new_s = period(state, "--keep-newer", arg);
        return 0;
    case OPT_WITHIN:
        p->keep_within_s = period(state, "--keep-within", arg);
        return 0;
    case OPT_DAILY:
        p->keep_daily = (uint32_t)number(state, "--keep-daily", arg, UINT32_MAX);
        return 0;
    case OPT_WEEKLY:
        p->keep_weekly = (uint32_t)number(state, "--keep-weekly", arg, UINT32_MAX);
        return 0;
    case OPT_MONTHLY:
        p->keep_monthly = (uint32_t)number(state, "--keep-monthly", arg, UINT32_MAX);
        return 0;
    case OPT_TAG:
        p->keep_tagged = 1;
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

const struct argp cli_policy_argp = {.options = options_table, .parser = parse};

bool cli_policy_given(const ckd_policy *p, struct argp_state *state) {
    bool given = p->keep_last || p->keep_every || p->keep_first || p->keep_best || p->keep_new_s ||
                 p->keep_within_s || p->keep_daily || p->keep_weekly || p->keep_monthly || p->keep_tagged;
    if (p->highest_is_best && !p->keep_best) {
        argp_error(state, "--highest-is-best goes with --keep-best");
    }
    return given;
}

static void add(cli_policy_text *out, size_t *used, const char *format, ...) CLI_PRINTF(3, 4);
static void add(cli_policy_text *out, size_t *used, const char *format, ...) {
    size_t available = sizeof(out->text) - *used;
    va_list args;
    int n = *used ? snprintf(out->text + *used, available, ", ") : 0;
    va_start(args, format);
    n += vsnprintf(out->text + *used + n, available - (size_t)n, format, args);
    va_end(args);
    *used += (size_t)n;
}

cli_policy_text cli_policy_words(const ckd_policy *p) {
    cli_policy_text out = {""};
    size_t used = 0;
    if (p->keep_last) {
        add(&out, &used, "the last %" PRIu32, p->keep_last);
    }
    if (p->keep_every) {
        add(&out, &used, "multiples of %" PRIu64, p->keep_every);
    }
    if (p->keep_first) {
        add(&out, &used, "the first");
    }
    if (p->keep_best) {
        add(&out, &used, "the best %" PRIu32 " (%s)", p->keep_best,
            p->highest_is_best ? "highest" : "lowest");
    }
    if (p->keep_new_s) {
        add(&out, &used, "newer than %s", cli_text_duration((double)p->keep_new_s).text);
    }
    if (p->keep_within_s) {
        add(&out, &used, "within %s of the newest", cli_text_duration((double)p->keep_within_s).text);
    }
    const struct {
        uint32_t count;
        const char *word;
    } periods[] = {{p->keep_daily, "daily"}, {p->keep_weekly, "weekly"}, {p->keep_monthly, "monthly"}};
    for (size_t i = 0; i < sizeof(periods) / sizeof(periods[0]); i++) {
        if (periods[i].count) {
            add(&out, &used, "%" PRIu32 " %s", periods[i].count, periods[i].word);
        }
    }
    if (p->keep_tagged) {
        add(&out, &used, "tagged ones");
    }
    return out;
}
