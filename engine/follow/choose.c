/* Finds the checkpoint that the folder should have, and says why it is not the newest. */
#include <stdio.h>
#include <stdlib.h>

#include "engine/follow/follow.h"

#define RETRY_NS   UINT64_C(60000000000) /* an unreadable file may become readable, as on NFS */
#define CATALOG_NS UINT64_C(1000000000)  /* how long after its manifest a writer may update the catalog */

static follow_failure *failure_of(const ckd_follow *f, const ckd_checkpoint *c) {
    for (size_t i = 0; i < f->failure_count; i++) {
        if (id_equal(&f->failures[i].id, &c->id)) {
            return &f->failures[i];
        }
    }
    return NULL;
}

ckd_status follow_remember_failure(ckd_follow *f, const ckd_checkpoint *c, ckd_error *err) {
    follow_failure *known = failure_of(f, c);
    if (!known) {
        ckd_status status =
            ARRAY_GROW(f->failures, f->failure_capacity, f->failure_count + 1, "failures", err);
        if (status != CKD_OK) {
            return status;
        }
        known = &f->failures[f->failure_count++];
    }
    *known = (follow_failure){c->id, c->generation, clock_monotonic_ns()};
    return CKD_OK;
}

/* Another generation counts as untried: a compaction or a repair may have mended it. */
static bool has_failed(const ckd_follow *f, const ckd_checkpoint *c) {
    const follow_failure *known = failure_of(f, c);
    return known && known->generation == c->generation && clock_monotonic_ns() - known->at_ns < RETRY_NS;
}

/* ---- the newest ---- */

void follow_report(ckd_follow *f, const char *what, const ckd_error *why) {
    uint64_t now = clock_monotonic_ns();
    if (!f->reported_ns || now - f->reported_ns > RETRY_NS) {
        store_message(f->store, "%s: %s", what, why->message);
        f->reported_ns = now;
    }
}

/* Finds the newest checkpoint of the run. Waits for the catalog, which a writer updates a moment after the manifest. */
static ckd_status find_newest(ckd_checkpoint *out, ckd_follow *f, ckd_error *err) {
    ckd_status status, sure;
    ckd_error why;
    uint64_t begun = clock_monotonic_ns();
    do {
        status = ckd_store_find(out, f->store, f->run[0] ? f->run : NULL, CKD_LATEST, err);
        sure = status == CKD_OK ? ckd_store_check_newest(f->store, out, &why) : CKD_OK;
        if (sure == CKD_E_EXISTS) {
            clock_sleep_ns(CATALOG_NS / 100);
        }
    } while (sure == CKD_E_EXISTS && clock_monotonic_ns() - begun < CATALOG_NS);
    f->hidden = sure == CKD_E_CORRUPT || sure == CKD_E_UNSUPPORTED;
    if (sure != CKD_OK && sure != CKD_E_EXISTS) {
        follow_report(f, "a newer checkpoint is passed over", &why);
    }
    return status;
}

/* Finds the run by the checkpoint in the folder, in case the run was renamed. */
static ckd_status find_renamed(ckd_checkpoint *out, ckd_follow *f, ckd_error *err) {
    ckd_checkpoint here;
    if (!f->run[0] || id_is_zero(&f->state.checkpoint) ||
        store_find_id(&here, f->store, &f->state.checkpoint, NULL) != CKD_OK ||
        strcmp(here.run, f->run) == 0) {
        return CKD_E_NOT_FOUND;
    }
    store_message(f->store, "run '%s' is now '%s', which is followed from now on", f->run, here.run);
    memcpy(f->run, here.run, sizeof(f->run));
    return find_newest(out, f, err);
}

/* Training that restarts from an older step continues as a branch with a name of its own. */
static void report_branch(ckd_follow *f, const ckd_checkpoint *newest) {
    char root[CKD_RUN_MAX + 1], branch[CKD_RUN_MAX + 1];
    unsigned number;
    ckd_checkpoint there;
    branch_root(root, &number, newest->run);
    if (branch_name(branch, root, number + 1, NULL) == CKD_OK && strcmp(branch, f->branch_reported) != 0 &&
        store_find(&there, f->store, branch, CKD_LATEST, NULL) == CKD_OK &&
        there.created_ns > newest->created_ns) {
        store_message(f->store,
                      "training of '%s' was rewound and continues as '%s' (step %llu), which is not followed",
                      newest->run, branch, (unsigned long long)there.step);
        memcpy(f->branch_reported, branch, sizeof(f->branch_reported));
    }
}

/* Chooses the newest checkpoint that is neither suspect nor known to be damaged. */
static ckd_status choose_in_run(ckd_checkpoint *out, uint64_t *skipped, ckd_follow *f, ckd_error *err) {
    ckd_error why = {.offset = CKD_NO_OFFSET};
    ckd_status status = find_newest(out, f, &why);
    ckd_status renamed = status == CKD_E_NOT_FOUND ? find_renamed(out, f, &why) : CKD_E_NOT_FOUND;
    status = renamed == CKD_OK ? CKD_OK : status;
    if (status != CKD_OK) {
        return err_from(err, status, &why);
    }
    memcpy(f->run, out->run, sizeof(f->run));
    report_branch(f, out);
    ckd_checkpoint newest = *out;
    *skipped = f->hidden;
    while (status == CKD_OK && (out->suspect || has_failed(f, out))) {
        ckd_checkpoint at = *out;
        *skipped += !at.suspect;
        status = ckd_store_previous(out, f->store, at.run, at.step, err);
    }
    if (newest.suspect && !id_equal(&newest.id, &f->suspect_reported)) {
        f->suspect_reported = newest.id;
        store_message(f->store, "%s@%llu is suspect and passed over", newest.run,
                      (unsigned long long)newest.step);
    }
    return status == CKD_E_NOT_FOUND && newest.suspect && !*skipped
               ? err_set(err, CKD_E_STATE, "all checkpoints of run '%s' are suspect", newest.run)
               : status;
}

ckd_status follow_choose(ckd_checkpoint *out, uint64_t *skipped, ckd_follow *f, ckd_error *err) {
    uint64_t none = 0;
    skipped = skipped ? skipped : &none;
    *skipped = 0;
    if (!f->options.tag) {
        return choose_in_run(out, skipped, f, err);
    }
    ckd_status status = ckd_store_find_tag(out, f->store, f->options.tag, err);
    if (status == CKD_OK && has_failed(f, out)) {
        *skipped = 1;
        return err_set(err, CKD_E_NOT_FOUND, "the checkpoint with tag '%s' is damaged", f->options.tag);
    }
    return status;
}
