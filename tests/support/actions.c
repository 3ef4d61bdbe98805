#include "tests/support/actions.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "base/file.h"
#include "tests/support/marks.h"
#include "tests/support/scenes.h"

size_t open_descriptors(void) {
    dir_list list;
    assert_int_equal(dir_list_read(&list, "/proc/self/fd", NULL), CKD_OK);
    size_t count = list.count;
    dir_list_free(&list);
    return count;
}

typedef ckd_status (*call_fn)(action *a, ckd_error *err);

/* Makes the call. With `once`, a call that failed because of a fault is repeated, and must work then. */
static ckd_status attempt(action *a, const char *name, call_fn call) {
    ckd_error err = {0};
    for (int i = 0; i < 2; i++) {
        unsigned long hits = a->trouble->hits;
        ckd_status status = call(a, &err);
        if (status == CKD_OK) {
            return CKD_OK;
        }
        if (a->trouble->hits == hits) {
            fail_msg("%s: %s without a fault in it: %s (%s)", name, ckd_status_name(status), err.message,
                     err.file);
        }
        a->trouble->check_failure(name, status, &err);
        if (!a->trouble->once) {
            return status;
        }
    }
    fail_msg("%s: failed again: %s (%s)", name, err.message, err.file);
    return err.status;
}

/* ---- calls ---- */

ckd_status call_open(action *a, ckd_error *err) {
    return scene_open(&a->store, a->dir, a->mode, err);
}

ckd_status call_save(action *a, ckd_error *err) {
    scene s = scene_of(a->step);
    return scene_save(NULL, a->store, &s, err);
}

static ckd_status call_save_ready(action *a, ckd_error *err) {
    scene s = scene_of(a->step);
    s.ready = true;
    return scene_save(NULL, a->store, &s, err);
}

static ckd_status call_save_base(action *a, ckd_error *err) {
    scene s = scene_of(a->step);
    s.base = true;
    return scene_save(NULL, a->store, &s, err);
}

static ckd_status call_save_ranks(action *a, ckd_error *err) {
    scene s = scene_of(a->step);
    return scene_save_ranks(NULL, a->store, &s, err);
}

static ckd_status call_rebuild(action *a, ckd_error *err) {
    ckd_rebuild_result result;
    ckd_store_options o = CKD_STORE_OPTIONS_INIT;
    o.threads = 1;
    ckd_status status = ckd_store_rebuild(&result, store_path_of(a->dir, ""), &o, err);
    assert_int_equal(status == CKD_OK, result.checkpoints > 0);
    return status;
}

/* After a fault, checkpoints that could not be read may be missing from the list. */
static ckd_status call_list(action *a, ckd_error *err) {
    ckd_checkpoint_list *list;
    unsigned long hits = a->trouble->hits;
    ckd_status status = ckd_store_list(&list, a->store, NULL, err);
    assert_true(status != CKD_OK || list->count == 3 || a->trouble->hits > hits);
    ckd_checkpoint_list_free(list);
    return status;
}

static ckd_status call_load(action *a, ckd_error *err) {
    scene s = scene_of(a->step);
    return scene_load(a->store, &s, err);
}

static ckd_status call_verify(action *a, ckd_error *err) {
    ckd_verify_result *result;
    unsigned long hits = a->trouble->hits;
    ckd_status status = ckd_store_verify(&result, a->store, NULL, err);
    assert_true(status != CKD_OK || (result->checkpoints == 3 && result->damage_count == 0) ||
                a->trouble->hits > hits);
    ckd_verify_result_free(result);
    return status;
}

static ckd_status call_report(action *a, ckd_error *err) {
    ckd_report *report;
    unsigned long hits = a->trouble->hits;
    ckd_status status = ckd_store_report(&report, a->store, err);
    assert_true(status != CKD_OK || report->checkpoint_count == 3 || a->trouble->hits > hits);
    ckd_report_free(report);
    return status;
}

static ckd_status call_tensors(action *a, ckd_error *err) {
    ckd_checkpoint newest;
    ckd_tensor_list *list = NULL;
    unsigned long hits = a->trouble->hits;
    ckd_status status = ckd_store_find(&newest, a->store, SCENE_RUN, CKD_LATEST, err);
    if (status == CKD_OK) {
        status = ckd_store_tensors(&list, a->store, &newest.id, err);
    }
    assert_true(status != CKD_OK || list->count == newest.tensors || a->trouble->hits > hits);
    ckd_tensor_list_free(list);
    return status;
}

/* Deletes those of the steps 1 and 2 that are listed. An earlier attempt may have deleted some of them. */
static ckd_status call_delete(action *a, ckd_error *err) {
    ckd_checkpoint_list *list;
    ckd_id ids[2];
    size_t count = 0;
    ckd_delete_options o = CKD_DELETE_OPTIONS_INIT;
    o.undo_s = 0;
    ckd_status status = ckd_store_list(&list, a->store, NULL, err);
    for (size_t i = 0; status == CKD_OK && i < list->count; i++) {
        if (list->items[i].step > 0) {
            ids[count++] = list->items[i].id;
        }
    }
    ckd_checkpoint_list_free(list);
    return status == CKD_OK ? ckd_store_delete(a->store, ids, count, &o, err) : status;
}

static ckd_status call_collect(action *a, ckd_error *err) {
    return ckd_store_collect(NULL, a->store, NULL, err);
}

static ckd_status call_undelete(action *a, ckd_error *err) {
    ckd_trash *trash;
    ckd_id ids[2];
    ckd_status status = ckd_store_trash(&trash, a->store, err);
    size_t count = status == CKD_OK ? trash->count : 0;
    for (size_t i = 0; i < count; i++) {
        ids[i] = trash->items[i].checkpoint.id;
    }
    ckd_trash_free(trash);
    return status == CKD_OK ? ckd_store_undelete(a->store, ids, count, err) : status;
}

/* An earlier attempt may have removed the mark already. */
static ckd_status call_mark(action *a, ckd_error *err) {
    ckd_status status = mark_change(a->store, a->marks, err);
    return mark_removes(a->marks) && status == CKD_E_NOT_FOUND && a->trouble->hits ? CKD_OK : status;
}

/* Begins a save, saves a blob, and aborts. */
static ckd_status call_abort(action *a, ckd_error *err) {
    ckd_save *save;
    ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
    o.run = SCENE_RUN;
    o.step = a->step;
    ckd_status status = ckd_save_begin(&save, a->store, &o, err);
    if (status == CKD_OK) {
        status = ckd_save_blob(save, "b", "x", 1, err);
    }
    ckd_save_abort(save);
    return status;
}

/* ---- actions ---- */

static void act_steps(action *a, ckd_open_mode mode, call_fn save, uint64_t first, uint64_t count) {
    a->mode = mode;
    if (attempt(a, "open", call_open) == CKD_OK) {
        for (a->step = first; a->step < first + count; a->step++) {
            if (attempt(a, "save", save) == CKD_OK) {
                a->committed |= UINT64_C(1) << a->step;
            }
        }
    }
}

void act_creates(action *a) {
    act_steps(a, CKD_OPEN_CREATE, call_save, 0, 1);
}

void act_saves_delta(action *a) {
    act_steps(a, CKD_OPEN_WRITE, call_save, 2, 1);
}

void act_saves_ready(action *a) {
    act_steps(a, CKD_OPEN_WRITE, call_save_ready, 2, 1);
}

void act_saves_ranks(action *a) {
    act_steps(a, CKD_OPEN_WRITE, call_save_ranks, 2, 1);
}

void act_reads(action *a) {
    a->mode = CKD_OPEN_READ;
    if (attempt(a, "open", call_open) == CKD_OK) {
        attempt(a, "list", call_list);
        for (a->step = 0; a->step < 3; a->step++) {
            attempt(a, "load", call_load);
        }
        attempt(a, "verify", call_verify);
        attempt(a, "report", call_report);
        attempt(a, "tensors", call_tensors);
    }
}

void act_deletes(action *a) {
    a->mode = CKD_OPEN_WRITE;
    if (attempt(a, "open", call_open) == CKD_OK && attempt(a, "delete", call_delete) == CKD_OK) {
        a->gone = 6;
        attempt(a, "collect", call_collect);
    }
}

void act_undeletes(action *a) {
    a->mode = CKD_OPEN_WRITE;
    if (attempt(a, "open", call_open) == CKD_OK && attempt(a, "undelete", call_undelete) == CKD_OK) {
        a->committed = 6;
    }
}

void act_prunes(action *a) {
    act_steps(a, CKD_OPEN_WRITE, call_save_base, 4, 1);
}

void act_marks(action *a) {
    a->mode = CKD_OPEN_WRITE;
    bool ok = attempt(a, "open", call_open) == CKD_OK;
    while (ok && a->marks < MARK_CHANGES) {
        ok = attempt(a, "mark", call_mark) == CKD_OK;
        a->marks += ok;
    }
}

void act_opens(action *a) {
    act_steps(a, CKD_OPEN_WRITE, NULL, 0, 0);
}

void act_rebuilds(action *a) {
    attempt(a, "rebuild", call_rebuild);
}

void act_aborts(action *a) {
    a->mode = CKD_OPEN_WRITE;
    a->step = 2;
    if (attempt(a, "open", call_open) == CKD_OK) {
        attempt(a, "abort", call_abort);
    }
}

/* A checkpoint that compaction left counts as failed. After the fault, all of them must be done. */
static ckd_status compact(action *a, const ckd_compact_options *o, ckd_error *err) {
    ckd_compaction *done;
    unsigned long hits = a->trouble->hits;
    ckd_status status = ckd_compact(&done, a->store, o, err);
    if (status != CKD_OK) {
        return status;
    }
    for (size_t i = 0; i < done->count && status == CKD_OK; i++) {
        status = done->items[i].left.status;
        *err = status != CKD_OK ? done->items[i].left : *err;
    }
    if (hits == 0 && status == CKD_OK && a->trouble->hits == 0) {
        assert_true(done->count > 0);
    }
    ckd_compaction_free(done);
    return status;
}

static ckd_status call_compact(action *a, ckd_error *err) {
    ckd_compact_options o = CKD_COMPACT_OPTIONS_INIT;
    o.max_depth = 1;
    return compact(a, &o, err);
}

static ckd_status call_fold(action *a, ckd_error *err) {
    ckd_compact_options o = CKD_COMPACT_OPTIONS_INIT;
    ckd_policy policy = CKD_POLICY_INIT;
    ckd_delete_options now = CKD_DELETE_OPTIONS_INIT;
    policy.keep_last = 2;
    now.undo_s = 0;
    o.policy = &policy;
    o.deletion = &now;
    return compact(a, &o, err);
}

static ckd_status call_pack(action *a, ckd_error *err) {
    ckd_compact_options o = CKD_COMPACT_OPTIONS_INIT;
    o.max_depth = 100;
    return compact(a, &o, err);
}

static ckd_status call_recode(action *a, ckd_error *err) {
    ckd_compact_options o = CKD_COMPACT_OPTIONS_INIT;
    o.max_depth = 100;
    o.cold_but_newest = 1;
    return compact(a, &o, err);
}

static ckd_status call_copy(action *a, ckd_error *err) {
    ckd_store *source;
    ckd_status status = scene_open(&source, a->source, CKD_OPEN_READ, err);
    if (status == CKD_OK) {
        status = ckd_copy(NULL, a->store, source, NULL, err);
        ckd_store_close(source);
    }
    return status;
}

void act_packs(action *a) {
    a->mode = CKD_OPEN_WRITE;
    if (attempt(a, "open", call_open) == CKD_OK) {
        attempt(a, "pack", call_pack);
    }
}

void act_recodes(action *a) {
    a->mode = CKD_OPEN_WRITE;
    if (attempt(a, "open", call_open) == CKD_OK) {
        attempt(a, "recode", call_recode);
    }
}

void act_copies(action *a) {
    a->mode = CKD_OPEN_CREATE;
    if (attempt(a, "open", call_open) == CKD_OK && attempt(a, "copy", call_copy) == CKD_OK) {
        a->committed = 15;
    }
}

void act_compacts(action *a) {
    a->mode = CKD_OPEN_WRITE;
    if (attempt(a, "open", call_open) == CKD_OK) {
        attempt(a, "compact", call_compact);
    }
}

void act_folds(action *a) {
    a->mode = CKD_OPEN_WRITE;
    if (attempt(a, "open", call_open) == CKD_OK && attempt(a, "fold", call_fold) == CKD_OK) {
        a->gone = 3;
        attempt(a, "collect", call_collect);
    }
}
