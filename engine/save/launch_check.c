/*
 * Detects two launches that save to one run by mistake: a session's saves follow each other, so the run's newest
 * checkpoint must be its own. Checked under the publish lock, when a save begins and again before its manifest is
 * published.
 */
#include <inttypes.h>
#include <stdio.h>
#include <time.h>

#include "engine/save/save.h"

static ckd_status find_newest(ckd_checkpoint *out, bool *found, const ckd_save *save, ckd_error *err) {
    ckd_error why = {0};
    ckd_status status = catalog_newest(out, save->store->catalog, save->target.run, UINT64_MAX, &why);
    *found = status == CKD_OK;
    return err_except(err, status, CKD_E_NOT_FOUND, &why);
}

static ckd_status another_launch(const ckd_save *save, const ckd_checkpoint *theirs, const char *when,
                                 ckd_error *err) {
    char hex[CKD_ID_TEXT], at[32] = "";
    struct tm utc;
    time_t seconds = (time_t)(theirs->created_ns / 1000000000);
    ckd_id_text(hex, &theirs->id);
    if (gmtime_r(&seconds, &utc)) {
        strftime(at, sizeof(at), "%Y-%m-%d %H:%M:%S", &utc);
    }
    return err_set(
        err, CKD_E_EXISTS,
        "another launch saves to run '%s': its checkpoint %s@%" PRIu64
        " (id %s, saved at %s UTC by %u ranks) is not this session's, and is newer than what this one %s; end one of "
        "both, or ask for branches (on_duplicate)",
        save->target.run, theirs->run, theirs->step, hex, at, (unsigned)theirs->world, when);
}

ckd_status save_follow_begin(ckd_save *save, ckd_error *err) {
    const save_follow *f = save->store->follow;
    if (!f || save->target.compare) {
        return CKD_OK;
    }
    save->follows = true;
    ckd_status status = find_newest(&save->newest, &save->has_newest, save, err);
    bool looked_at =
        save->options.on_duplicate == CKD_DUPLICATE_ERROR && strcmp(save->target.run, f->run) == 0;
    if (status != CKD_OK || !looked_at || !save->has_newest) {
        return status;
    }
    const ckd_checkpoint *newest = &save->newest;
    bool own = (f->has_last && id_equal(&newest->id, &f->last)) || id_equal(&newest->id, &f->tried);
    /* the session's last checkpoint was deleted, and older ones stayed */
    bool older = f->has_last && newest->step < f->step;
    return own || older ? CKD_OK
                        : another_launch(save, newest,
                                         f->own ? "saved or restored last" : "found when it was opened", err);
}

ckd_status save_follow_publish(const ckd_save *save, ckd_error *err) {
    ckd_checkpoint newest;
    bool found = false;
    ckd_status status = save->follows ? find_newest(&newest, &found, save, err) : CKD_OK;
    if (status != CKD_OK || !found) {
        return status;
    }
    bool same = save->has_newest && id_equal(&newest.id, &save->newest.id);
    bool older = save->has_newest && newest.step < save->newest.step;
    return same || older ? CKD_OK : another_launch(save, &newest, "found when its save began", err);
}
