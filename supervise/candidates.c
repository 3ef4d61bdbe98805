/* Finds the checkpoints from which an attempt may start, and chooses one. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "supervise/internal.h"

void candidate_ref(char ref[SUPERVISE_REF_MAX], const ckd_checkpoint *c) {
    snprintf(ref, SUPERVISE_REF_MAX, "%s@%" PRIu64, c->run, c->step);
}

bool supervise_is_of_run(const char *name, const char *run) {
    size_t length = strlen(run);
    if (strncmp(name, run, length) != 0) {
        return false;
    }
    const char *rest = name + length;
    return !*rest || (rest[0] == '~' && rest[1] && rest[1 + strspn(rest + 1, "0123456789")] == '\0');
}

/*
 * Merges the runs of a list that is sorted by run and step. The result has the newest first. Within a run, the highest
 * step is the newest. Between runs the date decides, as it does when a session looks for the newest state.
 */
static void merge(candidates *out, const ckd_checkpoint_list *list, const char *run) {
    bool *used = out->damaged; /* borrowed: all false, and reset below */
    for (;;) {
        size_t best = SIZE_MAX;
        for (size_t i = 0; i < list->count; i++) {
            const ckd_checkpoint *c = &list->items[i];
            bool last_left =
                i + 1 == list->count || used[i + 1] || strcmp(list->items[i + 1].run, c->run) != 0;
            if (!used[i] && last_left && supervise_is_of_run(c->run, run) &&
                (best == SIZE_MAX || c->created_ns >= list->items[best].created_ns)) {
                best = i;
            }
        }
        if (best == SIZE_MAX) {
            break;
        }
        used[best] = true;
        out->items[out->count++] = list->items[best];
    }
    memset(out->damaged, 0, list->count * sizeof(*out->damaged));
}

static ckd_status open_store(ckd_store **out, const char *path, uint32_t threads, ckd_error *err) {
    ckd_store_options o = CKD_STORE_OPTIONS_INIT;
    o.threads = threads;
    return ckd_store_open(out, path, CKD_OPEN_READ, &o, err);
}

ckd_status candidates_read(candidates *out, const char *store_path, const char *run, ckd_error *err) {
    ckd_store *store = NULL;
    ckd_checkpoint_list *list = NULL;
    *out = (candidates){.chosen = SIZE_MAX};
    ckd_status status = open_store(&store, store_path, 1, err);
    THEN(status, ckd_store_list(&list, store, NULL, err));
    if (status == CKD_OK) {
        out->items = calloc(list->count + 1, sizeof(*out->items));
        out->damaged = calloc(list->count + 1, sizeof(*out->damaged));
        status = out->items && out->damaged ? CKD_OK : supervise_error(err, CKD_E_NOMEM, "out of memory");
    }
    if (status == CKD_OK) {
        merge(out, list, run);
    } else {
        candidates_free(out);
    }
    ckd_checkpoint_list_free(list);
    ckd_store_close(store);
    return status;
}

/* An attempt from a suspect checkpoint would only fail again, because its values became NaN or infinite. */
static bool may_start_from(const candidates *c, size_t i) {
    return !c->damaged[i] && !c->items[i].suspect;
}

void candidates_free(candidates *c) {
    free(c->items);
    free(c->damaged);
    *c = (candidates){.chosen = SIZE_MAX};
}

static void say_damaged(const candidates_rule *rule, const char *ref, const ckd_damage *first) {
    supervise_say(rule->options, "%s is damaged and passed over: %.200s%s%.100s", ref, first->what,
                  first->file[0] ? ", file " : "", first->file);
}

/*
 * The first damage that prevents a load of the checkpoint; NULL: none. Damage to a materialized copy, for example, does
 * not.
 */
static const ckd_damage *harmful(const ckd_verify_result *r) {
    for (size_t i = 0; i < r->damage_count; i++) {
        if (r->damage[i].checkpoint_count > 0) {
            return &r->damage[i];
        }
    }
    return NULL;
}

typedef struct limited {
    const candidates_rule *rule;
    uint64_t until; /* monotonic */
    bool expired;
} limited;

static int on_limited_progress(void *context, uint64_t done, uint64_t total) {
    limited *l = context;
    if (l->rule->on_progress && l->rule->on_progress(l->rule->progress_context, done, total)) {
        return 1;
    }
    l->expired = supervise_monotonic() > l->until;
    return l->expired;
}

static void say_unverified(const candidates_rule *rule, const char *ref) {
    supervise_say(rule->options,
                  "%s has not been verified to the end after %" PRIu64
                  " s; the attempt starts from it, and verifies what it loads",
                  ref, rule->options->verify_limit_s);
}

static ckd_status is_whole(bool *whole, ckd_store *store, const ckd_checkpoint *c,
                           const candidates_rule *rule, ckd_error *err) {
    ckd_verify_options o = CKD_VERIFY_OPTIONS_INIT;
    o.run = c->run;
    o.step = c->step;
    o.one_step = 1;
    o.quick = rule->options->quick;
    limited l = {rule, supervise_monotonic() + rule->options->verify_limit_s * SECOND, false};
    o.on_progress = on_limited_progress;
    o.progress_context = &l;
    char ref[SUPERVISE_REF_MAX];
    candidate_ref(ref, c);
    *whole = rule->options->verify_limit_s == 0;
    if (*whole) {
        return CKD_OK;
    }
    ckd_verify_result *r = NULL;
    ckd_status status = ckd_store_verify(&r, store, &o, err);
    if (status == CKD_E_CANCELLED && l.expired) {
        say_unverified(rule, ref);
        *whole = true;
        return CKD_OK;
    }
    *whole = status == CKD_OK && !harmful(r);
    if (status == CKD_OK && !*whole) {
        say_damaged(rule, ref, harmful(r));
    }
    ckd_verify_result_free(r);
    return status == CKD_E_NOT_FOUND || status == CKD_E_CORRUPT ? CKD_OK : status; /* deleted meanwhile */
}

/*
 * Returns the attempt that made the checkpoint, if that attempt is alarmed and the step is that of the alarm or later;
 * else NULL.
 */
static const attempt *alarmed_maker(const ckd_checkpoint *c, const candidates_rule *rule) {
    for (size_t i = rule->count; rule->alarmed && i-- > 0;) {
        const attempt *a = &rule->history[i];
        if (c->created_ns >= a->start_ns) {
            return decide_is_alarmed(a) && c->step >= a->alarm_step ? a : NULL;
        }
    }
    return NULL;
}

/*
 * vain: tries only checkpoints from which attempts have failed; otherwise only the others. older: tries only
 * checkpoints from rule->before on backwards and, with rule->alarmed, those that attempts made before their alarms.
 */
static ckd_status choose_among(candidates *c, ckd_store *store, const candidates_rule *rule, bool vain,
                               bool older, ckd_error *err) {
    uint64_t good_count = 0;
    const char *before = older ? rule->before : NULL;
    bool alarmed = older && rule->alarmed;
    bool newer = before != NULL;
    for (size_t i = 0; i < c->count; i++) {
        char ref[SUPERVISE_REF_MAX];
        candidate_ref(ref, &c->items[i]);
        newer = newer && strcmp(ref, before) != 0;
        bool failed = decide_failures(rule->history, rule->count, ref) >= FAILURES_TO_GO_BACK, good;
        if (c->items[i].suspect && !c->suspect[0]) {
            snprintf(c->suspect, sizeof(c->suspect), "%s", ref);
        }
        if (newer || (older && alarmed_maker(&c->items[i], rule)) || failed != vain ||
            !may_start_from(c, i)) {
            continue;
        }
        ckd_status status = is_whole(&good, store, &c->items[i], rule, err);
        if (status != CKD_OK) {
            return status;
        }
        c->damaged[i] = !good;
        c->damaged_count += !good;
        c->chosen = good ? i : c->chosen;
        good_count += good;
        if (good && ((!c->suspect[0] && !alarmed) || good_count >= rule->options->rewind_on_nan)) {
            break;
        }
    }
    return CKD_OK;
}

/* Reports the suspect checkpoints that are newer than the chosen one, and those that an alarm excludes. */
static void say_suspect(const candidates *c, const candidates_rule *rule) {
    for (size_t i = 0; i < c->chosen; i++) {
        char ref[SUPERVISE_REF_MAX];
        const attempt *maker = alarmed_maker(&c->items[i], rule);
        candidate_ref(ref, &c->items[i]);
        if (c->items[i].suspect) {
            supervise_say(rule->options, "%s is suspect and passed over: values became NaN or infinite", ref);
        } else if (maker) {
            supervise_say(rule->options, "%s is passed over: it was made after an alarm at step %" PRIu64,
                          ref, maker->alarm_step);
        }
    }
}

static ckd_status none_left(const candidates *c, const char *run, ckd_error *err) {
    size_t suspects = 0;
    for (size_t i = 0; i < c->count; i++) {
        suspects += c->items[i].suspect != 0;
    }
    return suspects == 0
               ? supervise_error(
                     err, CKD_E_CORRUPT,
                     "none of the %zu checkpoints of %s is whole, and starting over would discard them; "
                     "'ckptdelta repair' may rebuild them from parity",
                     c->count, run)
               : supervise_error(
                     err, CKD_E_CORRUPT,
                     "of the %zu checkpoints of %s, %zu are suspect, as values became NaN or infinite, and the "
                     "others are not whole; starting over would discard them",
                     c->count, run, suspects);
}

ckd_status candidates_choose(candidates *c, const candidates_rule *rule, ckd_error *err) {
    if (c->count == 0) {
        return CKD_OK;
    }
    ckd_store *store = NULL;
    ckd_status status = open_store(&store, rule->options->store, rule->options->threads, err);
    if (rule->before || rule->alarmed) {
        THEN(status, choose_among(c, store, rule, false, true, err));
    }
    if (c->chosen == SIZE_MAX) {
        THEN(status, choose_among(c, store, rule, false, false, err));
    }
    /* If attempts from all checkpoints have failed, the newest is as good as any. */
    if (c->chosen == SIZE_MAX) {
        THEN(status, choose_among(c, store, rule, true, false, err));
    }
    ckd_store_close(store);
    if (status == CKD_OK && c->chosen == SIZE_MAX) {
        return none_left(c, rule->options->run, err);
    }
    if (status == CKD_OK) {
        say_suspect(c, rule);
    }
    return status;
}

uint64_t candidates_top(const candidates *c) {
    uint64_t top = SUPERVISE_NO_STEP;
    for (size_t i = 0; i < c->count; i++) {
        if (may_start_from(c, i) && (top == SUPERVISE_NO_STEP || c->items[i].step > top)) {
            top = c->items[i].step;
        }
    }
    return top;
}

static bool has_id(const candidates *c, const ckd_id *id) {
    for (size_t i = 0; i < c->count; i++) {
        if (memcmp(&c->items[i].id, id, sizeof(*id)) == 0) {
            return true;
        }
    }
    return false;
}

const ckd_checkpoint *candidates_first_new(const candidates *c, const candidates *before, uint64_t since) {
    const ckd_checkpoint *first = NULL;
    for (size_t i = 0; i < c->count; i++) {
        const ckd_checkpoint *item = &c->items[i];
        bool new = before ? !has_id(before, &item->id) : item->created_ns >= since;
        if (new && (!first || item->created_ns < first->created_ns)) {
            first = item;
        }
    }
    return first;
}

bool candidates_has_other(const candidates *c, const char *ref) {
    for (size_t i = 0; i < c->count; i++) {
        char own[SUPERVISE_REF_MAX];
        candidate_ref(own, &c->items[i]);
        if (may_start_from(c, i) && strcmp(own, ref) != 0) {
            return true;
        }
    }
    return false;
}
