/*
 * Begins and ends a save. ckd_save_begin resolves run, step and parent and writes the intent, both under the publish
 * lock (enter_store). Then it opens the parent (prepare_coding) and creates the chunk file. tensor.c is next.
 *
 * save_close ends every save, committed or not: it keeps or removes the files, and releases everything.
 */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "engine/save/internal.h"
#include "engine/decode/decode.h"
#include "engine/save/device.h"
#include "engine/store/store.h"

#define DEFAULT_MAX_LOAD_COST 4.0
#define DEFAULT_STAGING       (UINT64_C(256) << 20)

/*
 * Makes the intent durable before the chunk file exists, and locks it. The caller holds the publish lock. Others look
 * for intents under this lock, so they always see the new one locked.
 */
static ckd_status write_intent(ckd_save *save, ckd_error *err) {
    file_ref file = {.id = save->output.file_id, .rank = save->options.rank};
    intent written = {.id = save->output.writer_id,
                      .step = save->target.step,
                      .rank = save->options.rank,
                      .world = save->options.world,
                      .files = &file,
                      .file_count = 1};
    snprintf(written.run, sizeof(written.run), "%s", save->target.run);
    if (save->target.has_origin) {
        written.dependencies = &save->target.origin.id;
        written.dependency_count = 1;
    }
    bytes data = {0};
    intent_encode(&data, &save->store->id, &written);
    char hex[CKD_ID_TEXT], temp[64];
    ckd_id_text(hex, &save->output.writer_id);
    snprintf(temp, sizeof(temp), ".tmp-%s", hex);
    pathname p = path_intent(save->store->path, &save->output.writer_id);
    ckd_status status = data.failed ? err_nomem(err, METADATA_MAX, "an intent") : CKD_OK;
    THEN(status, file_create_durable(p.text, path_of(save->store->path, DIR_INTENTS, temp).text, data.data,
                                     data.size, err));
    THEN(status, lock_acquire(&save->output.intent_lock, p.text, LOCK_SHARED, false, INTENT_LOCK_MS, err));
    if (status != CKD_OK) {
        file_remove(p.text, true, NULL);
    }
    bytes_free(&data);
    return status;
}

/* A parent that cannot be read does not fail the save: a base is saved instead. */
static ckd_status open_parent(ckd_save *save, ckd_error *err) {
    ckd_error why = {0};
    ckd_status status = views_get(&save->sources.parent, &save->sources.views, &save->target.origin.id, &why);
    if (status == CKD_E_CORRUPT || status == CKD_E_UNSUPPORTED || status == CKD_E_IO ||
        status == CKD_E_NOT_FOUND) {
        store_message(save->store, "%s@%llu cannot be read (%s: %s); saving a base instead of a delta on it",
                      save->target.origin.run, (unsigned long long)save->target.origin.step, why.file,
                      why.message);
        return CKD_OK;
    }
    err_from(err, status, &why);
    if (status != CKD_OK) {
        return status;
    }
    budget_plan_ends(&save->coding.budget, &save->sources.views, save->sources.parent,
                     (rank_of_world){save->options.rank, save->options.world});
    return CKD_OK;
}

static ckd_status prepare_coding(ckd_save *save, ckd_error *err) {
    const ckd_save_options *o = &save->options;
    save->coding.budget.limit = o->max_load_cost > 0 ? o->max_load_cost : DEFAULT_MAX_LOAD_COST;
    bool lossy = save_coarsest_fidelity(save) > CKD_EXACT;
    save->coding.staging = o->staging_bytes ? o->staging_bytes : DEFAULT_STAGING;
    save->coding.grid = save_default_grid();
    save->coding.scratch = path_in(save->store->path, "data");
    /* lossy tiles take the whole limit, the rows of a matrix a part of it */
    save->registry.steps.limit = lossy ? 0 : save->coding.staging - save_held_bytes(save->coding.staging);
    save->registry.steps.scratch = save->coding.scratch.text;
    save->coding.budget.newest_limit =
        o->newest_load_cost > 0 ? o->newest_load_cost : save->coding.budget.limit;
    ckd_status status = CKD_OK;
    if (save->target.compare) {
        status = save_compare_begin(save, err);
    } else if (save->target.has_origin && !o->base && o->codec != CKD_CODEC_RAW) {
        status = open_parent(save, err);
    }
    save->coding.context = (coding_context){.codec = o->codec,
                                            .level = o->level,
                                            .views = &save->sources.views,
                                            .parent = save->sources.parent,
                                            .dedup_index = &save->registry.dedup_index,
                                            .referenced = &save->registry.referenced,
                                            .in_flight = &save->pipeline.in_flight,
                                            .registry_lock = &save->pipeline.registry_lock,
                                            .checkpoint = save->checkpoint};
    if (status != CKD_OK) {
        return status;
    }
    if (save->sources.parent) {
        save->registry.referenced =
            (referenced_checkpoints){.ids = {save->sources.parent->manifest.checkpoint.id}, .count = 1};
    }
    return save_workspace_take(save, err);
}

static ckd_status choose_ids(ckd_save *save, ckd_error *err) {
    save->checkpoint = save->options.checkpoint_id;
    ckd_status status = id_is_zero(&save->checkpoint) ? ckd_id_new(&save->checkpoint, err) : CKD_OK;
    THEN(status, ckd_id_new(&save->output.writer_id, err));
    return status == CKD_OK ? ckd_id_new(&save->output.file_id, err) : status;
}

/* Reports why the catalog does not list an existing manifest that has the name of this save's manifest. */
static ckd_status explain_manifest(const ckd_save *save, ckd_error *err) {
    const save_target *t = &save->target;
    manifest_list list;
    ckd_status status = manifests_read(&list, save->store, err);
    if (status != CKD_OK) {
        return status;
    }
    size_t at = 0;
    while (at < list.count && (list.items[at].step != t->step || strcmp(list.items[at].run, t->run) != 0)) {
        at++;
    }
    uint32_t generation = at < list.count ? list.items[at].generation : 0;
    manifests_free(&list);
    manifest m;
    ckd_error why = {0};
    status = store_read_manifest(&m, save->store, t->run, t->step, generation, &why);
    if (status == CKD_OK) {
        ckd_checkpoint listed;
        bool is_listed = store_find_id(&listed, save->store, &m.checkpoint.id, NULL) == CKD_OK;
        manifest_free(&m);
        if (is_listed && strcmp(listed.run, t->run) != 0) {
            return err_set(
                err, CKD_E_BUSY,
                "the run '%s' was renamed to '%s', and its old manifest of step %llu is not removed "
                "yet; save again when all loads have ended",
                t->run, listed.run, (unsigned long long)t->step);
        }
        err_set(&why, CKD_OK, "it is inconsistent, or another checkpoint has its id");
    }
    status = err_set(
        err, status == CKD_E_UNSUPPORTED ? status : CKD_E_CORRUPT,
        "the manifest of %s@%llu exists but cannot be used; restore it from a copy, or remove it to give "
        "that checkpoint up, or save to another run or as a branch: %s",
        t->run, (unsigned long long)t->step, why.message);
    return err_in_file(err, status, path_manifest(save->store->path, t->run, t->step, generation).text);
}

/*
 * A save may be the only writer for weeks, so it tries to complete a rename that was interrupted. It does not wait for
 * those who read: a state under a name that will change is better than none.
 */
static void complete_renames(const ckd_save *save) {
    ckd_error why = {.offset = CKD_NO_OFFSET};
    const ckd_save_options *o = &save->options;
    if (o->run && store_complete_renames(save->store) &&
        settings_check_not_renamed(save->store, o->run, &why) == CKD_E_BUSY) {
        store_message(save->store, "%.400s; step %llu is saved to run '%s' meanwhile", why.message,
                      (unsigned long long)o->step, o->run);
    }
}

/* Everything that must not change between the decision and the intent happens under the publish lock. */
static ckd_status enter_store(ckd_save *save, ckd_error *err) {
    ckd_store *store = save->store;
    file_lock *lock;
    ckd_status status = store_lock_publish(&lock, store, err);
    if (status != CKD_OK) {
        return status;
    }
    complete_renames(save);
    pthread_mutex_lock(&store->mutex);
    status = store_refresh_catalog_locked(store, err);
    THEN(status, save_resolve_target(&save->target, store, &save->options, err));
    THEN(status, launch_check_begin(save, err));
    /* a retry has the id of the existing checkpoint, with which it is compared */
    if (status == CKD_OK && !save->target.compare) {
        status = save_check_id_unused(save, err);
    }
    pthread_mutex_unlock(&store->mutex);
    if (status == CKD_OK && !save->target.compare) {
        uint32_t generation;
        status = manifests_new_generation(&generation, store, save->target.run, save->target.step, err);
        status = status == CKD_E_EXISTS ? explain_manifest(save, err) : status;
    }
    THEN(status, store_lock_reader(&save->output.reader_lock, store, err));
    if (status == CKD_OK && !save->target.compare) {
        status = write_intent(save, err);
        status = save_make_room(save, status) ? write_intent(save, err) : status;
    }
    lock_release(lock);
    return status;
}

static ckd_status create_chunk_file(ckd_save *save, ckd_error *err) {
    pathname p = path_chunk(save->store->path, &save->output.file_id, ".tmp");
    chunk_identity identity = {save->store->id, save->output.file_id, save->output.writer_id};
    ckd_status status = chunk_writer_create_in(&save->output.writer, p.text, &identity,
                                               save->pipeline.workspace->writing, err);
    if (status == CKD_OK && save_coarsest_fidelity(save) > CKD_EXACT) {
        /* small deltas, whose headers would be as large as the deltas */
        chunk_writer_gather(save->output.writer);
    } else if (status == CKD_OK) {
        /* an optimizer's step count of each parameter: many small tensors */
        chunk_writer_gather_many(save->output.writer);
    }
    return status;
}

static ckd_status begin(ckd_save *save, ckd_error *err) {
    ckd_status status = choose_ids(save, err);
    THEN(status, enter_store(save, err));
    THEN(status, prepare_coding(save, err));
    if (status == CKD_OK && !save->target.compare) {
        status = create_chunk_file(save, err);
        status = save_make_room(save, status) ? create_chunk_file(save, err) : status;
    }
    return status;
}

ckd_status ckd_save_begin(ckd_save **out, ckd_store *store, const ckd_save_options *options, ckd_error *err) {
    *out = NULL;
    ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
    ckd_status status = store_check_writable(store, err);
    THEN(status, COPY_OPTIONS(&o, options, "ckd_save_options", err));
    if (status != CKD_OK) {
        return status;
    }
    ckd_save *save = calloc(1, sizeof(*save));
    if (!save) {
        return err_nomem(err, sizeof(*save), "a save");
    }
    save->store = store;
    save->output.process = getpid();
    save->stats.begun_ns = clock_monotonic_ns();
    save->options = o;
    save->options.world = save->options.world ? save->options.world : 1;
    save_terms_put(&save->terms, &save->options);
    views_init(&save->sources.views, store);
    save->sources.views.copies_need_chains = true;
    float_mode mode = float_mode_enter();
    status = save->terms.failed ? err_nomem(err, PART_OPTIONS_MAX, "a save's options") : begin(save, err);
    float_mode_leave(mode);
    if (status != CKD_OK) {
        save_close(save, SAVE_DROPPED);
        return status;
    }
    if (save->options.metric_name) {
        snprintf(save->metric_name, sizeof(save->metric_name), "%s", save->options.metric_name);
    }
    *out = save;
    return CKD_OK;
}

/* ---- in between ---- */

ckd_status save_check_open(const ckd_save *save, ckd_error *err) {
    if (!save) {
        return err_set(err, CKD_E_INVALID, "there is no save: it is NULL");
    }
    if (save->state == SAVE_OPEN) {
        return CKD_OK;
    }
    return err_set(err, CKD_E_STATE,
                   save->state == SAVE_FAILED
                       ? "an earlier call on this save failed; it can only be aborted"
                       : "the save is sealed; it can only be published, ended or aborted");
}

/* ---- the end ---- */

/* false if some of them may be left. */
static bool remove_files(const ckd_save *save, save_end end) {
    const char *root = save->store->path;
    ckd_status status = file_remove(path_chunk(root, &save->output.file_id, ".tmp").text, true, NULL);
    if (status == CKD_OK && end == SAVE_DROPPED) {
        status = file_remove(path_chunk(root, &save->output.file_id, "").text, true, NULL);
        if (status == CKD_OK) {
            /* durable before the intent is removed */
            status = dir_sync(path_in(root, DIR_CHUNKS).text, NULL);
        }
    }
    return status == CKD_OK;
}

void save_close(ckd_save *save, save_end end) {
    if (!save) {
        return;
    }
    const char *root = save->store->path;
    save_stop_helpers(save);
    chunk_writer_abort(save->output.writer);
    chunk_writer_abort(save->output.materialized);
    if (save->output.materialized_closed && save->output.process == getpid()) {
        pathname p = path_materialized(save->store->path, &save->checkpoint, save->options.rank,
                                       &save->output.writer_id);
        file_remove(p.text, true, NULL);
    }
    if (save->output.intent_lock && save->output.process == getpid() && remove_files(save, end) &&
        end != SAVE_UNDECIDED) {
        file_remove(path_intent(root, &save->output.writer_id).text, true, NULL);
    }
    lock_release(save->output.intent_lock);
    lock_release(save->output.reader_lock);
    bytes_free(&save->terms);
    bytes_free(&save->input.rows);
    save_names_free(&save->registry.names);
    bytes_free(&save->registry.whole_masters);
    free(save->output.dependencies);
    free(save->stats.ranks);
    save_compare_free(&save->sources.compared);
    save_device_free(save);
    measures_free(&save->lossy.measures);
    measures_free(&save->registry.nonfinite);
    step_states_free(&save->registry.steps);
    save_workspace_return(save, end == SAVE_COMMITTED && save->output.process == getpid());
    content_index_free(&save->registry.dedup_index);
    arena_free(&save->registry.arena);
    views_free(&save->sources.views);
    free(save);
}
