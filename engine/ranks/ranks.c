/*
 * Collective saves over any transport: joining, planning, beginning, committing. All steps consist of one kind of
 * exchange (exchange.c).
 */
#include <stdlib.h>

#include "base/hash.h"
#include "engine/ranks/internal.h"
#include "engine/save/save.h"

#define LOOK_EVERY_NS UINT64_C(100000000) /* how often busy ranks check the others */

ckd_status rank_transport(ckd_transport *out, const ckd_transport *transport, ckd_error *err) {
    *out = (ckd_transport){0};
    return struct_copy(out, sizeof(*out), transport, SIZE_UP_TO(ckd_transport, leave), "ckd_transport", err);
}

/* An exchange must not fail for lack of memory: the other ranks would wait for this one. */
static ckd_status reserve_messages(ckd_ranks *g, const ckd_ranks_options *o, ckd_error *err) {
    size_t world = o->rank == 0 ? o->world : 1;
    g->all = calloc(world, sizeof(*g->all));
    g->sent = calloc(world, sizeof(*g->sent));
    return g->all && g->sent && rank_message_reserve(&g->message) && rank_message_reserve(&g->reply)
               ? CKD_OK
               : err_nomem(err, world * sizeof(*g->all), "messages between ranks");
}

ckd_status ckd_ranks_join(ckd_ranks **out, ckd_store *store, const ckd_ranks_options *options,
                          ckd_error *err) {
    return ranks_join(out, store, options, NULL, err);
}

ckd_status ranks_join(ckd_ranks **out, ckd_store *store, const ckd_ranks_options *options,
                      const cancel_check *stop, ckd_error *err) {
    *out = NULL;
    ckd_ranks_options o = CKD_RANKS_OPTIONS_INIT;
    ckd_status status = COPY_OPTIONS(&o, options, "ckd_ranks_options", err);
    if (status != CKD_OK) {
        return status;
    }
    o.world = o.world ? o.world : 1;
    if (o.rank >= o.world || o.world > CKD_WORLD_MAX) {
        return err_set(err, CKD_E_INVALID, "rank %u of %u: ranks are 0 ... world - 1, at most %d",
                       (unsigned)o.rank, (unsigned)o.world, CKD_WORLD_MAX);
    }
    if (o.transport && (o.transport->rank != o.rank || o.transport->world != o.world)) {
        return err_set(err, CKD_E_INVALID, "the transport is for another rank or world");
    }
    ckd_transport transport = {0};
    if (o.transport) {
        status = rank_transport(&transport, o.transport, err);
        if (status != CKD_OK) {
            return status;
        }
        if (!transport.gather || !transport.broadcast) {
            return err_set(err, CKD_E_INVALID, "to save, a transport must have gather and broadcast");
        }
    }
    status = store_check_writable(store, err);
    ckd_ranks *g = status == CKD_OK ? calloc(1, sizeof(*g)) : NULL;
    THEN(status, g ? plan_cache_new(&g->plans, 0, err) : err_nomem(err, sizeof(*g), "a group of ranks"));
    THEN(status, reserve_messages(g, &o, err));
    if (status == CKD_OK && o.transport) {
        g->transport = transport;
    } else if (status == CKD_OK) {
        status = rank_files_join(&g->transport, store, &o, stop, err);
        g->files = status == CKD_OK ? g->transport.context : NULL;
    }
    if (status != CKD_OK) {
        ckd_ranks_leave(g);
        return status;
    }
    g->store = store;
    g->rank = o.rank;
    g->world = o.world;
    *out = g;
    return CKD_OK;
}

void ckd_ranks_leave(ckd_ranks *g) {
    if (g) {
        if (g->transport.leave) {
            g->transport.leave(g->transport.context);
        }
        plan_cache_free(g->plans);
        bytes_free(&g->message);
        bytes_free(&g->reply);
        free(g->all);
        free(g->sent);
        free(g);
    }
}

void ranks_watch(ckd_ranks *g, const rank_watch *watch) {
    if (g->files) {
        g->files->watch = *watch;
    }
}

void ranks_break_off(ckd_ranks *g) {
    if (g && g->files) {
        g->files->silent = true;
    }
    ckd_ranks_leave(g);
}

/* ---- planning ---- */

/* Looks up the plan of the ranks' hashes. The answer is its key, and one byte: is it known? */
static ckd_status find_plan(void *context, const ckd_bytes *sent, bytes *answer, ckd_error *err) {
    ckd_ranks *g = context;
    hash128 *hashes = calloc(g->world, sizeof(*hashes));
    if (!hashes) {
        return err_nomem(err, g->world * sizeof(*hashes), "hashes of descriptions");
    }
    for (uint32_t r = 0; r < g->world; r++) {
        memcpy(hashes[r].bytes, sent[r].data,
               sent[r].size < sizeof(hashes[r].bytes) ? sent[r].size : sizeof(hashes[r].bytes));
    }
    hash128 key = plan_key_of_hashes(hashes, g->world);
    bytes_put(answer, key.bytes, sizeof(key.bytes));
    bytes_put_u8(answer, plan_cache_find(g->plans, &key) != NULL);
    free(hashes);
    return CKD_OK;
}

static ckd_status make_plan(void *context, const ckd_bytes *sent, bytes *answer, ckd_error *err) {
    const ckd_ranks *g = context;
    ckd_plan *plan;
    ckd_bytes text = {NULL, 0};
    ckd_status status = ckd_plan_make(&plan, sent, g->world, err);
    THEN(status, plan_bytes(&text, plan, err));
    bytes_put(answer, text.data, text.size);
    ckd_bytes_free(&text);
    ckd_plan_free(plan);
    return status;
}

static ckd_status exchange_descriptions(const ckd_plan **out, ckd_ranks *g, const ckd_bytes *own_tensors,
                                        ckd_error *err) {
    exchange x = {.g = g, .combine = make_plan, .context = g};
    ckd_plan *plan = NULL;
    ckd_status status = rank_exchange(&x, CKD_OK, NULL, own_tensors, err);
    if (status == CKD_OK) {
        ckd_error why = {0};
        ckd_status read = plan_read(&plan, x.answer.data, x.answer.size, &why);
        status = ranks_agree(g, read, &why, NULL, 0, err); /* all have the plan, or none */
    }
    if (status == CKD_OK) {
        plan_cache_add(g->plans, plan);
        *out = plan;
    } else {
        ckd_plan_free(plan);
    }
    rank_exchange_end(&x);
    return status;
}

ckd_status ckd_ranks_plan(const ckd_plan **out, ckd_ranks *g, const ckd_tensor *tensors, size_t count,
                          ckd_error *err) {
    *out = NULL;
    ckd_bytes own_tensors;
    ckd_error why = {0};
    ckd_status own = ckd_plan_describe(&own_tensors, g->rank, g->world, tensors, count, &why);
    hash128 hash = plan_description_hash(&own_tensors), key;
    ckd_bytes sent = {hash.bytes, sizeof(hash.bytes)};
    exchange x = {.g = g, .combine = find_plan, .context = g};
    ckd_status status = rank_exchange(&x, own, &why, &sent, err);
    bool cached = false;
    if (status == CKD_OK && x.answer.size == sizeof(key.bytes) + 1) {
        memcpy(key.bytes, x.answer.data, sizeof(key.bytes));
        cached = ((const uint8_t *)x.answer.data)[sizeof(key.bytes)] != 0;
        *out = cached ? plan_cache_find(g->plans, &key) : NULL;
    }
    rank_exchange_end(&x);
    if (status == CKD_OK && cached && !*out) {
        g->broken = true;
        status = err_set(err, CKD_E_STATE, "rank 0 has a plan that rank %u does not have", (unsigned)g->rank);
    } else if (status == CKD_OK && !cached) {
        status = exchange_descriptions(out, g, &own_tensors, err);
    }
    ckd_bytes_free(&own_tensors);
    return status;
}

/* ---- beginning ---- */

typedef struct beginning {
    const ckd_ranks *g;
    ckd_save_options options;
    ckd_save *save;
} beginning;

/* Rank 0 begins first. If it fails, no other rank needs to try. */
static ckd_status begin_first(void *context, const ckd_bytes *sent, bytes *answer, ckd_error *err) {
    beginning *b = context;
    for (uint32_t r = 1; r < b->g->world; r++) {
        ckd_status same = save_terms_compare(&sent[0], 0, &sent[r], r, err);
        if (same != CKD_OK) {
            return same;
        }
    }
    ckd_status status =
        id_is_zero(&b->options.checkpoint_id) ? ckd_id_new(&b->options.checkpoint_id, err) : CKD_OK;
    THEN(status, ckd_save_begin(&b->save, b->g->store, &b->options, err));
    bytes_put(answer, b->options.checkpoint_id.bytes, sizeof(ckd_id));
    return status;
}

/* From now on the save fails as soon as another rank is found dead. It is committed only if no rank has given it up. */
static void watch_others(ckd_save *save, const ckd_ranks *g) {
    if (g->files && g->world > 1) {
        save->group.stop = (cancel_check){.poll = rank_poll, .context = g->files, .every_ns = LOOK_EVERY_NS};
        save->group.claim = rank_claim_commit;
        save->group.claim_context = g->files;
    }
}

ckd_status ckd_ranks_begin(ckd_save **out, ckd_ranks *g, const ckd_save_options *options, ckd_error *err) {
    *out = NULL;
    beginning b = {.g = g, .options = CKD_SAVE_OPTIONS_INIT};
    ckd_error why = {0};
    ckd_status status = COPY_OPTIONS(&b.options, options, "ckd_save_options", &why);
    b.options.rank = g->rank;
    b.options.world = g->world;
    bytes place = {0};
    save_terms_put(&place, &b.options);
    status = status == CKD_OK && place.failed ? err_nomem(&why, place.size, "a message") : status;
    ckd_bytes sent = {place.data, place.size};
    exchange x = {.g = g, .combine = begin_first, .context = &b};
    status = rank_exchange(&x, status, &why, &sent, err);
    bytes_free(&place);
    if (status == CKD_OK && g->rank != 0) {
        ckd_status begun = CKD_E_CORRUPT;
        if (x.answer.size == sizeof(ckd_id)) {
            memcpy(b.options.checkpoint_id.bytes, x.answer.data, sizeof(ckd_id));
            begun = ckd_save_begin(&b.save, g->store, &b.options, &why);
        }
        status = ranks_agree(g, begun, &why, NULL, 0, err);
    } else if (status == CKD_OK) {
        status = ranks_agree(g, CKD_OK, &why, NULL, 0, err);
    }
    rank_exchange_end(&x);
    if (status != CKD_OK) {
        ckd_save_abort(b.save);
        return status;
    }
    watch_others(b.save, g);
    *out = b.save;
    return CKD_OK;
}

/* ---- the commit ---- */

typedef struct commitment {
    ckd_ranks *g;
    ckd_save *save; /* NULL once published */
    ckd_checkpoint info;
} commitment;

/* The answer names the manifest. */
#define ANSWER_MAX (2 + CKD_RUN_MAX + 8 + 4)
_Static_assert(ANSWER_MAX <= RANK_MESSAGE_SURE, "a committed checkpoint must not be reported as an error");
static ckd_status publish_parts(void *context, const ckd_bytes *sent, bytes *answer, ckd_error *err) {
    commitment *c = context;
    uint32_t world = c->g->world;
    ckd_part *parts = calloc(world, sizeof(*parts));
    if (!parts) {
        return err_nomem(err, world * sizeof(*parts), "parts");
    }
    for (uint32_t r = 0; r < world; r++) {
        parts[r] = (ckd_part){sent[r].data, sent[r].size};
    }
    if (!bytes_extend(answer, ANSWER_MAX)) { /* after the commit point nothing may fail */
        free(parts);
        return err_nomem(err, ANSWER_MAX, "an answer");
    }
    bytes_clear(answer);
    ckd_status status = save_publish(&c->info, c->save, parts, world, err);
    c->save = NULL;
    free(parts);
    bytes_put_string(answer, c->info.run);
    bytes_put_u64(answer, c->info.step);
    bytes_put_u32(answer, c->info.generation);
    return status;
}

static ckd_status read_info(ckd_checkpoint *info, const ckd_store *store, const manifest_name *name,
                            ckd_error *err) {
    manifest m;
    ckd_status status = store_read_manifest(&m, store, name->run, name->step, name->generation, err);
    if (status == CKD_OK) {
        *info = m.checkpoint;
        manifest_free(&m);
    }
    return status;
}

/*
 * Finds the manifest of this step that has this id: its checkpoint is committed. NOT_FOUND: there is none, and all
 * manifests of the step could be read. Other errors: an unreadable manifest may be this one.
 */
static ckd_status find_by_id(ckd_checkpoint *info, const ckd_store *store, const ckd_id *id, uint64_t step,
                             ckd_error *err) {
    manifest_list list;
    ckd_error unread = {.status = CKD_E_NOT_FOUND};
    ckd_status status = manifests_read(&list, store, err);
    if (status != CKD_OK) {
        return status;
    }
    bool found = false;
    for (size_t i = 0; i < list.count && !found; i++) {
        ckd_error why = {0};
        if (list.items[i].step != step) {
            continue;
        }
        status = read_info(info, store, &list.items[i], &why);
        found = status == CKD_OK && id_equal(&info->id, id);
        unread = status == CKD_OK ? unread : why;
    }
    manifests_free(&list);
    return found ? CKD_OK : err_from(err, unread.status, &unread);
}

/*
 * Whether the checkpoint is committed. Rank 0 holds the publish lock from its claim to the end of its commit, and may
 * take back a manifest that it could not make durable. So the answer is only final under that lock, or if rank 0 has
 * ended or will not begin. The name must also be made durable, because rank 0 may have died before it was.
 */
static ckd_status find_committed(commitment *c, const ckd_id *id, uint64_t step, bool ended, ckd_error *err) {
    const ckd_store *store = c->g->store;
    file_lock *lock;
    ckd_status status = store_lock_publish(&lock, store, err);
    if (status == CKD_OK || ended) {
        status = find_by_id(&c->info, store, id, step, err);
        THEN(status, dir_sync(path_in(store->path, DIR_MANIFESTS).text, err));
    }
    lock_release(lock);
    return status;
}

/*
 * The outcome was not reported, so this rank gives the save up. If rank 0 claimed it first, this rank waits for that
 * commit to end, and then a manifest decides. This rank's part is removed, too, unless a manifest names it: rank 0
 * cannot commit without it. If none of this worked, the outcome remains unknown.
 */
static ckd_status find_out(commitment *c, ckd_status status, ckd_error *err) {
    ckd_store *store = c->g->store;
    ckd_id id = c->save->checkpoint, file = c->save->output.file_id;
    uint64_t step = c->save->target.step;
    char run[CKD_RUN_MAX + 1];
    memcpy(run, c->save->target.run, sizeof(run));
    rank_commit decision = c->g->files ? rank_give_up_commit(c->g->files, &id) : COMMIT_UNKNOWN;
    ckd_save_abort(c->save);
    c->save = NULL;
    ckd_error why = {0};
    ckd_status found = find_committed(c, &id, step, decision == COMMIT_GIVEN_UP, &why);
    bool settled = decision != COMMIT_UNKNOWN || !file_exists(path_chunk(store->path, &file, "").text);
    if (found == CKD_OK || (found == CKD_E_NOT_FOUND && settled)) {
        return found == CKD_OK ? CKD_OK : status;
    }
    return err_set(
        err, status,
        "rank %u does not know whether %s@%llu was committed, %s%s: check whether the checkpoint exists before "
        "you save it again",
        (unsigned)c->g->rank, run, (unsigned long long)step,
        found == CKD_E_NOT_FOUND ? "and could not withdraw its part, so it may still be"
                                 : "as it cannot look: ",
        found == CKD_E_NOT_FOUND ? "" : why.message);
}

static ckd_status take_outcome(commitment *c, const exchange *x, ckd_status status, ckd_error *err) {
    ckd_store *store = c->g->store;
    if (status == CKD_OK) {
        reader at = reader_of(x->answer.data, x->answer.size);
        manifest_name name = {.step = 0};
        reader_string(&at, name.run, sizeof(name.run));
        name.step = reader_u64(&at);
        name.generation = reader_u32(&at);
        ckd_id id = c->save->checkpoint;
        ckd_save_end(c->save);
        c->save = NULL;
        if (read_info(&c->info, store, &name, NULL) != CKD_OK) { /* it is committed anyway */
            c->info = (ckd_checkpoint){.id = id, .step = name.step, .generation = name.generation};
            memcpy(c->info.run, name.run, sizeof(c->info.run));
        }
        return CKD_OK;
    }
    if (c->save && !x->agreed) {
        return find_out(c, status, err);
    }
    ckd_save_abort(c->save);
    c->save = NULL;
    return status;
}

static ckd_status finish(ckd_checkpoint *info, ckd_ranks *g, ckd_save *save, const ckd_error *failed,
                         ckd_error *err) {
    commitment c = {.g = g, .save = save};
    exchange x = {.g = g, .combine = publish_parts, .context = &c, .commits = true};
    ckd_part part = {NULL, 0};
    ckd_error why = {0};
    ckd_status status = failed ? err_from(&why, failed->status ? failed->status : CKD_E_STATE, failed)
                        : save->group.stop.poll ? save->group.stop.poll(save->group.stop.context, &why)
                                                : CKD_OK;
    THEN(status, ckd_save_seal(&part, save, &why));
    if (status != CKD_OK) { /* comes first, because it frees space for the message on a full disk */
        ckd_save_abort(save);
        c.save = NULL;
    }
    ckd_bytes sent = {part.data, part.size};
    status = rank_exchange(&x, status, &why, &sent, err);
    if (g->rank != 0) {
        status = take_outcome(&c, &x, status, err);
    }
    ckd_save_abort(c.save);
    rank_exchange_end(&x);
    ckd_part_free(&part);
    if (status == CKD_OK && g->rank == 0) { /* the others have the result and continue */
        g->store->hooks->after_commit(g->store, c.info.run);
    }
    if (info) {
        *info = status == CKD_OK ? c.info : (ckd_checkpoint){.step = 0};
    }
    return status;
}

ckd_status ckd_ranks_commit(ckd_checkpoint *info, ckd_ranks *g, ckd_save *save, ckd_error *err) {
    if (save->target.compare) { /* a save of one rank that only compares: nothing to publish */
        return ckd_save_commit(info, save, err);
    }
    return finish(info, g, save, NULL, err);
}

ckd_status ckd_ranks_abort(ckd_ranks *g, ckd_save *save, const ckd_error *why) {
    finish(NULL, g, save, why, NULL);
    return why->status ? why->status : CKD_E_STATE;
}

ckd_status ckd_ranks_save(ckd_checkpoint *info, ckd_ranks *g, const ckd_save_options *options,
                          const ckd_tensor *tensors, size_t count, ckd_error *err) {
    if (info) {
        *info = (ckd_checkpoint){.step = 0};
    }
    const ckd_plan *plan;
    ckd_save *save;
    ckd_error why = {0};
    ckd_status status = ckd_ranks_plan(&plan, g, tensors, count, err);
    THEN(status, ckd_ranks_begin(&save, g, options, err));
    if (status != CKD_OK) {
        return status;
    }
    for (size_t i = 0; i < count && status == CKD_OK; i++) {
        if (ckd_plan_writes(plan, g->rank, i)) {
            status = ckd_save_tensor(save, &tensors[i], &why);
        }
    }
    if (status != CKD_OK) {
        return err_from(err, ckd_ranks_abort(g, save, &why), &why);
    }
    return ckd_ranks_commit(info, g, save, err);
}
