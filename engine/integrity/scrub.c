/*
 * Verifies a store little by little. It reads whole chunk files, beginning with the one that was verified least
 * recently. The catalog keeps the times. A file is opened under the reader lock and read without it. It may be unlinked
 * meanwhile, but nobody waits for a long read.
 */
#include <stdlib.h>

#include "engine/store/store.h"
#include "engine/integrity/internal.h"

/* How often verified files are recorded in the catalog. A crash loses at most the records of this time. */
#define REMEMBER_NS (60 * UINT64_C(1000000000))

typedef struct due_file {
    const live_file *listed;
    uint64_t verified_ns;
    bool waits; /* it was verified recently */
} due_file;

typedef struct scrubbing {
    ckd_store *store;
    const ckd_scrub_options *options;
    ckd_scrub_result *result;
    damage_list damage;
    throttled_check check;
    rate_limiter limiter;
    live_files live;
    due_file *files; /* of `live`; the first `due` in reading order */
    size_t file_count, due;
    scrubbed_files done, damaged; /* not recorded in the catalog yet */
    uint64_t written_ns;
} scrubbing;

/* ---- files ---- */

static ckd_status read_manifests(scrubbing *s, ckd_error *err) {
    ckd_status status = live_files_read(&s->live, s->store, &s->damage, err);
    if (status == CKD_OK) {
        s->files = calloc(s->live.count + 1, sizeof(*s->files));
        status =
            s->files ? CKD_OK : err_nomem(err, s->live.count * sizeof(*s->files), "the files of a store");
    }
    for (size_t i = 0; i < s->live.count && status == CKD_OK; i++) {
        s->files[s->file_count++].listed = &s->live.items[i];
    }
    return status;
}

/* ---- files that are due ---- */

/* No times are kept for files in the trash. They come after all other files that are due. */
static int by_age(const void *a, const void *b) {
    const due_file *x = a, *y = b;
    int order = (int)x->waits - (int)y->waits;
    order = order ? order : (int)x->listed->in_trash - (int)y->listed->in_trash;
    order = order ? order : (x->verified_ns > y->verified_ns) - (x->verified_ns < y->verified_ns);
    return order ? order : (x->listed > y->listed) - (x->listed < y->listed);
}

static int by_name(const void *name, const void *state) {
    return strcmp(name, ((const catalog_file_state *)state)->name);
}

/* A time in the future is ignored: the clock was set back. */
static void look_up(scrubbing *s, uint64_t now) {
    size_t time_count;
    catalog_file_state *times = scrub_times_load(&time_count, s->store);
    for (size_t i = 0; i < s->file_count; i++) {
        char name[64];
        due_file *f = &s->files[i];
        scrub_times_name(name, &f->listed->file.id);
        const catalog_file_state *k =
            time_count ? bsearch(name, times, time_count, sizeof(*times), by_name) : NULL;
        bool right = k && k->size == f->listed->file.size && k->verified_ns <= now;
        f->verified_ns = right ? k->verified_ns : 0;
    }
    free(times);
}

static void choose_due(scrubbing *s) {
    uint64_t now = clock_wall_ns(), longest = now / UINT64_C(1000000000);
    uint64_t older_s = s->options->older_than_s < longest ? s->options->older_than_s : longest;
    uint64_t before = now - older_s * UINT64_C(1000000000);
    look_up(s, now);
    for (size_t i = 0; i < s->file_count; i++) {
        s->files[i].waits = s->files[i].verified_ns > before;
    }
    if (s->file_count) {
        qsort(s->files, s->file_count, sizeof(*s->files), by_age);
    }
    while (s->due < s->file_count && !s->files[s->due].waits) {
        s->limiter.total += s->files[s->due++].listed->file.size;
    }
}

/* ---- reading a file ---- */

/* Called after each record. The file is open by now, and may be unlinked. */
static ckd_status throttle(void *context, uint64_t stored_bytes, ckd_error *err) {
    throttled_check *c = context;
    lock_release(c->reader);
    c->reader = NULL;
    return rate_limiter_add(c->limiter, stored_bytes, err);
}

static ckd_status check(throttled_check *c, const live_file *f, ckd_error *err) {
    char checkpoint[CHECKPOINT_TEXT];
    file_check check = {.store = c->store,
                        .damage = c->damage,
                        .dependency_infos = c->files->dependency_infos,
                        .dependency_info_count = c->files->dependency_info_count,
                        .payload = &c->payload,
                        .throttle = throttle,
                        .throttle_context = c};
    live_file_checkpoint(checkpoint, f);
    return check_named_file(&check, &f->file, checkpoint, err);
}

ckd_status throttled_check_file(bool *right, bool *listed, throttled_check *c, const live_file *f,
                                ckd_error *err) {
    ckd_verify_result *found = c->damage->result;
    size_t before = found->damage_count;
    pathname path = path_manifest(c->store->path, f->name.run, f->name.step, f->name.generation);
    ckd_status status = store_lock_reader(&c->reader, c->store, err);
    if (status != CKD_OK) {
        return status;
    }
    /*
     * A file that was collected meanwhile is no damage. Its manifest may also have gone alone, because another one
     * names the file now.
     */
    bool needed = file_exists(path.text) || file_exists(path_chunk(c->store->path, &f->file.id, "").text);
    status = needed ? check(c, f, err) : CKD_OK;
    lock_release(c->reader);
    c->reader = NULL;
    found->files += needed;
    found->bytes += needed ? f->file.size : 0;
    if (right) {
        *right = needed && found->damage_count == before;
    }
    if (listed) {
        *listed = needed;
    }
    return status;
}

/* ---- reading those that are due ---- */

static ckd_status write_verified(ckd_store *store, ckd_error *err) {
    /* This writes the times, too, if there is anything else to write. */
    ckd_status status = store_refresh_catalog_locked(store, err);
    if (status != CKD_OK || !store->scrubbed.count) {
        return status;
    }
    status = catalog_begin(store->catalog, err);
    THEN(status, scrub_times_write(store, err));
    if (status != CKD_OK) {
        catalog_rollback(store->catalog);
        return status;
    }
    status = catalog_commit(store->catalog, err);
    store->scrubbed.count = status == CKD_OK ? 0 : store->scrubbed.count;
    return status;
}

ckd_status scrub_record(ckd_store *store, scrubbed_files *files, uint32_t timeout_ms, ckd_error *err) {
    file_lock *lock;
    if (!files->count) {
        return CKD_OK;
    }
    ckd_status status = store_lock_publish_within(&lock, store, timeout_ms, err);
    if (status == CKD_OK) {
        scrub_times_queue(store, files);
        pthread_mutex_lock(&store->mutex);
        status = write_verified(store, err);
        pthread_mutex_unlock(&store->mutex);
        lock_release(lock);
    }
    return status;
}

/* Records the results. A failure only causes a message, because the caller must still learn of damage. */
static void remember(scrubbing *s, uint32_t timeout_ms) {
    ckd_error why = {0};
    ckd_status status = scrub_record(s->store, &s->damaged, timeout_ms, &why);
    THEN(status, scrub_record(s->store, &s->done, timeout_ms, &why));
    if (status != CKD_E_BUSY) {
        s->written_ns = clock_monotonic_ns();
    }
    if (status != CKD_OK && timeout_ms) {
        store_message(s->store, "the catalog could not record which files were verified: %s", why.message);
    }
}

static ckd_status scrub_file(scrubbing *s, due_file *f, ckd_error *err) {
    bool right;
    uint64_t begun = clock_wall_ns(), end = s->limiter.done + f->listed->file.size;
    ckd_verify_result *found = s->result->found;
    uint64_t files = found->files, read = found->bytes;
    ckd_status status = throttled_check_file(&right, NULL, &s->check, f->listed, err);
    s->limiter.done = end;
    if (status != CKD_OK) {
        found->files = files; /* it was not read to its end, so it is still due */
        found->bytes = read;
        return status;
    }
    if (!s->done.count) {
        s->done.at_ns = begun; /* begin of the first file: no file of the batch was verified earlier */
    }
    f->verified_ns = right ? begun : 0; /* a damaged file comes first next time */
    file_ref file = f->listed->file;
    manifest single = {.files = &file, .file_count = 1};
    return scrub_times_add(right ? &s->done : &s->damaged, &single, err);
}

static bool out_of_time(const scrubbing *s) {
    uint64_t seconds = s->options->max_time_s;
    return seconds && (clock_monotonic_ns() - s->limiter.begun_ns) / UINT64_C(1000000000) >= seconds;
}

static ckd_status scrub_files(scrubbing *s, size_t *at, ckd_error *err) {
    ckd_status status = rate_limiter_add(&s->limiter, 0, err);
    for (*at = 0; *at < s->due && status == CKD_OK;) {
        if (out_of_time(s) && *at > 0) {
            break;
        }
        status = scrub_file(s, &s->files[*at], err);
        *at += status == CKD_OK;
        if (clock_monotonic_ns() - s->written_ns > REMEMBER_NS) {
            remember(s, 0);
        }
    }
    return status;
}

/*
 * Reads all parity files, because no times are kept for them. It begins with a random group, so that each group gets
 * its turn even if there is never time for all. It holds no reader lock: a file that is removed meanwhile is no damage.
 */
static ckd_status scrub_parity(scrubbing *s, ckd_error *err) {
    parity_sets sets = {0};
    rate_limiter p = s->limiter;
    p.begun_ns = clock_monotonic_ns();
    p.done = p.total = 0;
    uint64_t random = 0;
    ckd_status status = parity_sets_read(&sets, s->store, &s->damage, err);
    THEN(status, random_bytes(&random, sizeof(random), err));
    for (size_t i = 0; i < sets.count && status == CKD_OK && !out_of_time(s); i++) {
        const parity_set *set = sets.items[(random % sets.count + i) % sets.count];
        for (uint32_t row = 0; row < set->group.rows && status == CKD_OK; row++) {
            status = parity_check_row(set, row, s->store, &s->damage, &p, err);
        }
    }
    parity_sets_free(&sets);
    return status;
}

static void sum_up(scrubbing *s, size_t at) {
    ckd_scrub_result *r = s->result;
    for (size_t i = at; i < s->due; i++) {
        r->files_left++;
        r->bytes_left += s->files[i].listed->file.size;
    }
    uint64_t oldest = UINT64_MAX;
    for (size_t i = 0; i < s->file_count; i++) {
        const due_file *f = &s->files[i];
        oldest = f->verified_ns < oldest && !f->listed->in_trash ? f->verified_ns : oldest;
    }
    r->oldest_ns = oldest == UINT64_MAX ? 0 : oldest;
    r->found->checkpoints = s->live.dependency_info_count;
}

static ckd_status scrub(scrubbing *s, ckd_error *err) {
    size_t at = 0;
    ckd_status status = read_manifests(s, err);
    THEN(status, settings_damage(&s->damage, s->store, err));
    if (status != CKD_OK) {
        return status;
    }
    choose_due(s);
    status = scrub_files(s, &at, err);
    remember(s, s->store->options.lock_timeout_ms); /* also after a cancelled scrub */
    sum_up(s, at);
    if (status == CKD_OK && at == s->due) {
        status = scrub_parity(s, err);
    }
    if (status != CKD_OK && status != CKD_E_CANCELLED) {
        return status;
    }
    ckd_status named = damage_add_dependents(&s->damage, s->live.dependency_infos,
                                             s->live.dependency_info_count, status == CKD_OK ? err : NULL);
    return status == CKD_OK ? named : status;
}

ckd_status ckd_store_scrub(ckd_scrub_result **out, ckd_store *store, const ckd_scrub_options *options,
                           ckd_error *err) {
    ckd_scrub_options o = CKD_SCRUB_OPTIONS_INIT;
    *out = NULL;
    ckd_status status = COPY_OPTIONS(&o, options, "ckd_scrub_options", err);
    THEN(status, store_check_writable(store, err));
    if (status != CKD_OK) {
        return status;
    }
    scrubbing s = {.store = store, .options = &o, .result = calloc(1, sizeof(*s.result))};
    s.written_ns = clock_monotonic_ns();
    s.limiter = (rate_limiter){.bytes_per_s = o.bytes_per_s,
                               .on_progress = o.on_progress,
                               .context = o.progress_context,
                               .cancelled = "the scrub was cancelled; what it verified is remembered",
                               .begun_ns = s.written_ns};
    if (!s.result || !(s.result->found = calloc(1, sizeof(*s.result->found)))) {
        ckd_scrub_result_free(s.result);
        return err_nomem(err, sizeof(*s.result), "a scrub");
    }
    s.damage = (damage_list){.result = s.result->found, .store_path = store->path};
    s.check = (throttled_check){store, &s.damage, &s.live, &s.limiter, {0}, NULL};
    status = scrub(&s, err);
    bytes_free(&s.check.payload);
    live_files_free(&s.live);
    free(s.files);
    free(s.done.ids);
    free(s.damaged.ids);
    if (status == CKD_OK || status == CKD_E_CANCELLED) {
        *out = s.result;
    } else {
        ckd_scrub_result_free(s.result);
    }
    return status;
}

void ckd_scrub_result_free(ckd_scrub_result *result) {
    if (result) {
        ckd_verify_result_free(result->found);
        free(result);
    }
}
