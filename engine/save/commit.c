/*
 * Commits a save: each rank's file durable -> publish lock -> all files still there -> manifest (the commit point) ->
 * catalog. Begin with ckd_save_commit, which calls ckd_save_seal and ckd_save_publish. publish_manifest is the commit
 * point.
 *
 * A failure before it leaves nothing. If the manifest has its name but cannot be synced or removed, recovery decides
 * (store/recovery.c). A failure after it (the catalog) loses nothing: the next open for writing repairs the catalog.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "engine/store/store.h"
#include "engine/save/internal.h"
#include "engine/decode/decode.h"

/* Closes the copies' file. It keeps its temporary name until the checkpoint is committed. */
static void close_materialized(ckd_save *save) {
    if (save->output.materialized) {
        save->output.materialized_closed =
            chunk_writer_close(save->output.materialized, &save->output.copied_bytes, NULL) == CKD_OK;
        save->output.materialized = NULL;
    }
}

/* Called after the commit: gives the copies the name that loads look for. */
static void name_materialized(ckd_save *save) {
    if (save->output.materialized_closed) {
        const char *root = save->store->path;
        pathname temp =
            path_materialized(root, &save->checkpoint, save->options.rank, &save->output.writer_id);
        pathname final = path_materialized(root, &save->checkpoint, save->options.rank, NULL);
        save->output.materialized_closed = file_rename(temp.text, final.text, NULL) != CKD_OK;
    }
}

/*
 * Rank 0 may have another parent, because one may be deleted between the ranks' begins. The blocks of this rank may
 * name only older checkpoints, which have no manifests any more. Rank 0 finds their files through the manifest of this
 * rank's parent, so the part names that, too.
 */
static ckd_status name_parent(ckd_save *save, ckd_error *err) {
    const view *parent = save->sources.parent;
    return save->options.rank > 0 && parent && save->output.dependency_count
               ? save_depend(&save->output, &parent->manifest.checkpoint.id, err)
               : CKD_OK;
}

ckd_status ckd_save_seal(ckd_part *out, ckd_save *save, ckd_error *err) {
    *out = (ckd_part){NULL, 0};
    ckd_status status = save_check_open(save, err);
    if (status == CKD_OK && save->target.compare) {
        status = err_set(err, CKD_E_STATE,
                         "this save only compares with an existing checkpoint; commit it instead");
    }
    THEN(status, save_finish_blocks(save, err));
    if (status != CKD_OK) {
        return status;
    }
    save_free_space(save, 0, 0);
    /* nothing more is coded, and the commit needs memory for an index of all blocks */
    content_index_free(&save->registry.dedup_index);
    save_names_free(&save->registry.names);
    save->output.sealed = (file_ref){.id = save->output.file_id, .rank = save->options.rank};
    save->state = SAVE_FAILED; /* until all has succeeded: a failed sync is never retried on the same file */
    status = measures_append(&save->lossy.measures, &save->registry.nonfinite, err);
    THEN(status, measures_write_all(&save->lossy.measures, save->output.writer, &save->checkpoint, err));
    if (status != CKD_OK) {
        return status;
    }
    chunk_writer *writer = save->output.writer;
    save->output.writer = NULL;
    uint64_t begun_ns = clock_monotonic_ns();
    status = chunk_writer_finish_durable(writer, &save->output.sealed.root, &save->output.sealed.size, err);
    if (status == CKD_OK) {
        pathname temp = path_chunk(save->store->path, &save->output.file_id, ".tmp");
        status = file_rename_noreplace(temp.text,
                                       path_chunk(save->store->path, &save->output.file_id, "").text, err);
    }
    THEN(status, dir_sync(path_in(save->store->path, DIR_CHUNKS).text, err));
    save_stage_add(&save->stats.sync, clock_monotonic_ns() - begun_ns);
    save_make_room(save, status); /* makes space for the caller's next save, not for this one */
    THEN(status, name_parent(save, err));
    bytes data = {0};
    if (status == CKD_OK) {
        close_materialized(save); /* last, so that it gets only the space that is left */
        rank_part p = {.checkpoint = save->checkpoint,
                       .rank = save->options.rank,
                       .world = save->options.world,
                       .file = save->output.sealed,
                       .dependencies = save->output.dependencies,
                       .dependency_count = save->output.dependency_count,
                       .options = save->terms.data,
                       .options_size = save->terms.size};
        save_put_times(&p, save);
        part_encode(&data, &save->store->id, &p);
        status = data.failed ? err_nomem(err, data.size, "a part") : CKD_OK;
    }
    if (status != CKD_OK) {
        bytes_free(&data);
        return status;
    }
    save->state = SAVE_SEALED;
    *out = (ckd_part){data.data, data.size};
    return CKD_OK;
}

void ckd_part_free(ckd_part *p) {
    if (p) {
        free(p->data);
        *p = (ckd_part){NULL, 0};
    }
}

/* ---- from parts to a manifest ---- */

static ckd_status add_part(ckd_save *save, manifest *m, const ckd_part *bytes_of, ckd_error *err) {
    rank_part p;
    ckd_status status = part_decode(&p, &save->store->id, bytes_of->data, bytes_of->size, err);
    if (status != CKD_OK) {
        return status;
    }
    if (!id_equal(&p.checkpoint, &save->checkpoint) || p.world != save->options.world || p.rank >= p.world) {
        status = err_set(err, CKD_E_INVALID, "the part of rank %u belongs to another save", (unsigned)p.rank);
    }
    if (status == CKD_OK) {
        ckd_bytes own_terms = {save->terms.data, save->terms.size}, part_terms = {p.options, p.options_size};
        status = save_terms_compare(&own_terms, save->options.rank, &part_terms, p.rank, err);
    }
    for (size_t i = 0; i < m->file_count && status == CKD_OK; i++) {
        if (m->files[i].rank == p.rank) {
            status = err_set(err, CKD_E_INVALID, "there are two parts of rank %u", (unsigned)p.rank);
        }
    }
    for (size_t i = 0; i < p.dependency_count && status == CKD_OK; i++) {
        status = save_depend(&save->output, &p.dependencies[i], err);
    }
    THEN(status, save_take_times(save, &p, err));
    if (status == CKD_OK) {
        m->files[m->file_count++] = p.file;
    }
    part_free(&p);
    return status;
}

static int by_rank(const void *a, const void *b) {
    const file_ref *x = a, *y = b;
    return x->rank < y->rank ? -1 : x->rank > y->rank;
}

static ckd_status collect_parts(ckd_save *save, manifest *m, const ckd_part *parts, size_t count,
                                ckd_error *err) {
    if (count != save->options.world) {
        return err_set(err, CKD_E_INVALID, "there are %zu parts, but the save has %u ranks", count,
                       (unsigned)save->options.world);
    }
    m->files = calloc(count, sizeof(*m->files));
    if (!m->files) {
        return err_nomem(err, count * sizeof(*m->files), "a manifest's files");
    }
    for (size_t i = 0; i < count; i++) {
        ckd_status status = add_part(save, m, &parts[i], err);
        if (status != CKD_OK) {
            return status;
        }
    }
    qsort(m->files, count, sizeof(*m->files), by_rank);
    m->own_count = m->file_count;
    m->dependencies = calloc(save->output.dependency_count + 1, sizeof(*m->dependencies));
    if (!m->dependencies) {
        return err_nomem(err, save->output.dependency_count * sizeof(*m->dependencies),
                         "a manifest's dependencies");
    }
    if (save->output.dependency_count) {
        memcpy(m->dependencies, save->output.dependencies,
               save->output.dependency_count * sizeof(*m->dependencies));
    }
    m->dependency_count = save->output.dependency_count;
    return CKD_OK;
}

static void describe(const ckd_save *save, manifest *m) {
    ckd_checkpoint *c = &m->checkpoint;
    const save_target *t = &save->target;
    ckd_fidelity fidelity = save_coarsest_fidelity(save);
    *c = (ckd_checkpoint){.id = save->checkpoint,
                          .resumed_from = t->resumed_from,
                          .step = t->step,
                          .kind = m->dependency_count     ? CKD_DELTA
                                  : fidelity != CKD_EXACT ? CKD_LOSSY_BASE
                                                          : CKD_BASE,
                          .fidelity = fidelity,
                          .lossy_resumes = t->lossy_resumes,
                          .world = save->options.world,
                          .metric = save->metric_name[0] ? save->options.metric : NAN};
    memcpy(c->run, t->run, sizeof(c->run));
    memcpy(c->metric_name, save->metric_name, sizeof(c->metric_name));
    if (c->kind == CKD_DELTA) { /* another rank may have found a parent although this rank had none */
        c->parent = t->has_origin ? t->origin.id : m->dependencies[0];
    }
    m->branch_origin = t->branch_origin;
}

static ckd_status older_file_gone(const pathname *file, ckd_error *err) {
    ckd_status status = err_set(err, CKD_E_NOT_FOUND,
                                "a chunk file that this delta builds on is gone; save again, as a base");
    return err_in_file(err, status, file->text);
}

/*
 * A rank may have died meanwhile, and recovery may have removed its file. Another process may have removed a file on
 * which the save depends. Under the publish lock, the files that still exist will stay.
 */
static ckd_status check_files(const ckd_save *save, const manifest *m, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < m->file_count && status == CKD_OK; i++) {
        status = live_file_check(save->store, &m->files[i], err);
        if (status == CKD_E_NOT_FOUND && i >= m->own_count) {
            pathname p = path_chunk(save->store->path, &m->files[i].id, "");
            return older_file_gone(&p, err);
        }
        if (status == CKD_E_NOT_FOUND) {
            return err_set(
                err, status,
                "the chunk file of rank %u is gone: its process ended before the commit; save again",
                (unsigned)m->files[i].rank);
        }
    }
    return status;
}

static ckd_status add_dependencies_files(ckd_save *save, manifest *m, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < m->dependency_count && status == CKD_OK; i++) {
        status = manifest_add_files_of(m, save->store, &m->dependencies[i], err);
    }
    return status;
}

/*
 * Adds the files on which blocks may depend: the parent's. If this rank has no readable parent, other ranks may have
 * one, so the files of all dependencies are added.
 */
static ckd_status add_parents_files(ckd_save *save, manifest *m, ckd_error *err) {
    if (save->sources.parent) {
        const manifest *p = &save->sources.parent->manifest;
        return manifest_add_files(m, p->files, p->file_count, err);
    }
    return add_dependencies_files(save, m, err);
}

/* Opens the checkpoint as it is to be published, and drops the files that it does not read. */
static ckd_status open_draft(view **out, ckd_save *save, manifest *m, ckd_error *err) {
    manifest copy = *m;
    copy.files = NULL;
    copy.dependencies = NULL;
    copy.file_count = copy.dependency_count = 0;
    *out = NULL;
    ckd_status status = manifest_add_files(&copy, m->files, m->file_count, err);
    if (status != CKD_OK) {
        manifest_free(&copy);
        return status;
    }
    status = view_open(out, save->store, &copy, NULL, CKD_E_MISMATCH, err);
    if (status != CKD_OK) {
        return status;
    }
    save->sources.views.values_only = true; /* from here on, views only lead to older records */
    status = closure_prove_files(m, &save->sources.views, *out, err);
    if (status != CKD_OK) {
        view_close(*out);
        *out = NULL;
    }
    return status;
}

/*
 * Names the files that the checkpoint reads. A rank that began before or after a deletion may have another parent than
 * this one. So if something is missing, the files of all dependencies are named as well and the search is repeated. The
 * second search also finds a file that a repair has just put back. A file that is gone gives an error of its own, after
 * which the save can be repeated.
 */
static ckd_status find_files(view **out, ckd_save *save, manifest *m, ckd_error *err) {
    ckd_error why = {.offset = CKD_NO_OFFSET}, gone = {.offset = CKD_NO_OFFSET};
    *out = NULL;
    ckd_status status = add_parents_files(save, m, err);
    if (status != CKD_OK) {
        return status;
    }
    status = open_draft(out, save, m, &why);
    if (status == CKD_E_CORRUPT || status == CKD_E_UNSUPPORTED || status == CKD_E_IO) {
        manifest own = *m;
        own.file_count = own.own_count;
        ckd_status found = check_files(save, &own, err);
        THEN(found, add_dependencies_files(save, m, err));
        if (found != CKD_OK) {
            return found;
        }
        why = (ckd_error){.offset = CKD_NO_OFFSET};
        status = open_draft(out, save, m, &why);
        if (status == CKD_E_CORRUPT && check_files(save, m, &gone) != CKD_OK) {
            return err_from(err, gone.status, &gone);
        }
    }
    return err_from(err, status, &why);
}

static ckd_status complete_manifest(ckd_save *save, manifest *m, suspect_verdict *verdict, ckd_error *err) {
    describe(save, m);
    view *v;
    ckd_status status = find_files(&v, save, m, err);
    if (status != CKD_OK) {
        return status;
    }
    status = view_attach_measures(v, CKD_E_MISMATCH, err);
    if (status == CKD_OK) { /* totals, depth and cost come from the files' records, whoever wrote them */
        status = totals_set(m, v, err);
        suspect_judge(verdict, save, v);
        m->checkpoint.suspect = verdict->reasons;
    }
    THEN(status, self_check_run(save, v, err));
    view_close(v);
    return status;
}

/* ---- publishing ---- */

/*
 * A manifest that has its name but may not be durable does not count as committed. If it cannot be removed durably,
 * recovery decides.
 */
static ckd_status publish_manifest(ckd_save *save, manifest *m, ckd_error *err) {
    const char *root = save->store->path;
    ckd_checkpoint *c = &m->checkpoint;
    ckd_status status = manifests_new_generation(&c->generation, save->store, c->run, c->step, err);
    if (status == CKD_E_EXISTS) {
        return err_set(err, CKD_E_EXISTS, "another writer has committed %s@%llu meanwhile", c->run,
                       (unsigned long long)c->step);
    }
    bytes data = {0};
    if (status == CKD_OK) {
        manifest_encode(&data, &save->store->id, m);
        status = data.failed ? err_nomem(err, data.size, "a manifest") : CKD_OK;
    }
    if (status == CKD_OK) {
        pathname p = path_manifest(root, c->run, c->step, c->generation);
        char hex[CKD_ID_TEXT], temp[64];
        ckd_id_text(hex, &save->output.writer_id);
        snprintf(temp, sizeof(temp), ".tmp-%s", hex);
        pathname temporary = path_of(root, DIR_MANIFESTS, temp);
        status =
            file_publish_durable(&save->output.undecided, p.text, temporary.text, data.data, data.size, err);
        if (status != CKD_OK) {
            file_remove(temporary.text, true, NULL);
        }
    }
    c->stored_bytes += status == CKD_OK ? data.size : 0;
    bytes_free(&data);
    return status;
}

static ckd_status add_to_catalog(ckd_save *save, const manifest *m, ckd_error *err) {
    ckd_store *store = save->store;
    ckd_status status = catalog_begin(store->catalog, err);
    if (status != CKD_OK) {
        return status;
    }
    manifest copy;
    status = store_read_manifest(&copy, store, m->checkpoint.run, m->checkpoint.step,
                                 m->checkpoint.generation, err);
    if (status == CKD_OK) {
        status = store_ingest(store, &copy, err);
        manifest_free(&copy);
    }
    THEN(status, save_store_times(save, &m->checkpoint, err));
    THEN(status, store_record_fingerprint(store, err));
    if (status == CKD_OK) {
        return catalog_commit(store->catalog, err);
    }
    catalog_rollback(store->catalog);
    return status;
}

/* Called after the commit point: whatever happens here, the checkpoint stays. */
static void update_catalog(ckd_save *save, const manifest *m) {
    ckd_store *store = save->store;
    ckd_error why = {0};
    ckd_status status = add_to_catalog(save, m, &why);
    /* SQLite notices a full disk before it syncs, so its transaction left nothing behind */
    if (save_make_room(save, status)) {
        status = add_to_catalog(save, m, &why);
    }
    if (status != CKD_OK) {
        store_use_memory_catalog(store, NULL); /* so that this handle finds the checkpoint */
        store_message(
            store,
            "%s@%llu is committed, but the catalog could not be updated (%s); the next save or open for "
            "writing will update it",
            m->checkpoint.run, (unsigned long long)m->checkpoint.step, why.message);
    }
}

/* Two checkpoints must not have the same id: deltas could not tell them apart. */
ckd_status save_check_id_unused(const ckd_save *save, ckd_error *err) {
    ckd_checkpoint existing;
    ckd_error why = {0};
    ckd_status status = catalog_find_id(&existing, save->store->catalog, &save->checkpoint, &why);
    if (status == CKD_OK) {
        return err_set(err, CKD_E_INVALID,
                       "checkpoint_id is already used by %s@%llu; make a new one with ckd_id_new",
                       existing.run, (unsigned long long)existing.step);
    }
    return err_except(err, status, CKD_E_NOT_FOUND, &why);
}

static ckd_status publish_locked(ckd_save *save, manifest *m, ckd_error *err) {
    pthread_mutex_lock(&save->store->mutex);
    ckd_status status = store_refresh_catalog_locked(save->store, err);
    THEN(status, save_check_id_unused(save, err));
    THEN(status, launch_check_publish(save, err));
    THEN(status, check_files(save, m, err));
    THEN(status, save_date(&m->checkpoint, save, err));
    if (status == CKD_OK && save->group.claim) {
        status = save->group.claim(save->group.claim_context, &save->checkpoint, err);
    }
    if (status == CKD_OK) {
        status = publish_manifest(save, m, err);
        if (!save->output.undecided && save_make_room(save, status)) {
            status = publish_manifest(save, m, err);
        }
    }
    if (status == CKD_OK) {
        update_catalog(save, m);
        name_materialized(save);
        materialized_evict(save->store);
    }
    pthread_mutex_unlock(&save->store->mutex);
    return status;
}

static ckd_status publish(ckd_checkpoint *info, ckd_save *save, const ckd_part *parts, size_t count,
                          ckd_error *err) {
    if (save->state != SAVE_SEALED) {
        return err_set(err, CKD_E_STATE,
                       "this save is not sealed yet: call ckd_save_seal before ckd_save_publish");
    }
    manifest m = {0};
    suspect_verdict verdict = {.reasons = 0};
    save->stats.publish_ns = clock_monotonic_ns();
    ckd_status status = collect_parts(save, &m, parts, count, err);
    THEN(status, complete_manifest(save, &m, &verdict, err));
    file_lock *lock = NULL;
    THEN(status, store_lock_publish(&lock, save->store, err));
    THEN(status, publish_locked(save, &m, err));
    lock_release(lock);
    if (status == CKD_OK) {
        *info = m.checkpoint;
        suspect_report(&verdict, save->store, info);
    }
    manifest_free(&m);
    return status;
}

ckd_status save_publish(ckd_checkpoint *info, ckd_save *save, const ckd_part *parts, size_t count,
                        ckd_error *err) {
    memset(info, 0, sizeof(*info));
    float_mode mode = float_mode_enter();
    ckd_status status = publish(info, save, parts, count, err);
    float_mode_leave(mode);
    save_close(save, status == CKD_OK         ? SAVE_COMMITTED
                     : save->output.undecided ? SAVE_UNDECIDED
                                              : SAVE_DROPPED);
    return status;
}

ckd_status ckd_save_publish(ckd_checkpoint *info, ckd_save *save, const ckd_part *parts, size_t count,
                            ckd_error *err) {
    if (!save) {
        return save_check_open(save, err);
    }
    ckd_checkpoint committed;
    ckd_store *store = save->store;
    ckd_status status = save_publish(&committed, save, parts, count, err);
    if (info) {
        *info = committed;
    }
    if (status == CKD_OK) {
        store->hooks->after_commit(store, committed.run);
    }
    return status;
}

static ckd_status finish_compare(ckd_checkpoint *info, ckd_save *save, ckd_error *err) {
    ckd_status status = save_check_open(save, err);
    THEN(status, save_compare_end(save, err));
    if (status == CKD_OK && info) {
        *info = save->target.existing;
    }
    save_close(save, SAVE_DROPPED);
    return status;
}

ckd_status ckd_save_commit(ckd_checkpoint *info, ckd_save *save, ckd_error *err) {
    if (info) {
        memset(info, 0, sizeof(*info));
    }
    if (!save) {
        return save_check_open(save, err);
    }
    if (save->target.compare) {
        return finish_compare(info, save, err);
    }
    ckd_part part_of_one;
    ckd_status status = ckd_save_seal(&part_of_one, save, err);
    if (status != CKD_OK) {
        save_close(save, SAVE_DROPPED);
        return status;
    }
    status = ckd_save_publish(info, save, &part_of_one, 1, err);
    ckd_part_free(&part_of_one);
    return status;
}

void ckd_save_abort(ckd_save *save) {
    /*
     * The coordinator may have the part. Only recovery can then tell if a manifest names the file, so it runs at
     * once.
     */
    bool handed_out = save && save->state == SAVE_SEALED && save->options.world > 1;
    bool same_process = save && save->output.process == getpid();
    ckd_store *store = save ? save->store : NULL;
    file_lock *lock;
    save_close(save, handed_out ? SAVE_UNDECIDED : SAVE_DROPPED);
    if (handed_out && same_process && store_lock_publish(&lock, store, NULL) == CKD_OK) {
        store_recover(store, NULL);
        lock_release(lock);
    }
}

void ckd_save_end(ckd_save *save) {
    if (!save) {
        return;
    }
    ckd_checkpoint committed;
    save_end end = SAVE_UNDECIDED;
    if (store_find_id(&committed, save->store, &save->checkpoint, NULL) == CKD_OK) {
        name_materialized(save);
        end = SAVE_COMMITTED;
    }
    save_close(save, end);
}
