/*
 * Verifying little by little: chunk files are read through, the one first that was not for the longest; the catalog remembers. A file is opened under the reader lock and read
 * without it: it may be unlinked meanwhile, but nobody has to wait for a read that takes its time.
 */
#include <stdio.h>
#include <stdlib.h>

#include "engine/file_check.h"
#include "engine/notes.h"
#include "engine/parity.h"

/* What was verified is written to the catalog so often: so much is read again after a crash. */
#define REMEMBER_NS (60 * UINT64_C(1000000000))
#define NAP_NS      (UINT64_C(100000000)) /* at most, between two looks at what the caller wants */

typedef struct due_file {
    note_file file;
    manifest_name name; /* that names it */
    uint64_t verified_ns;
} due_file;

typedef struct scrubbing {
    ckd_store *store;
    const ckd_scrub_options *options;
    ckd_scrub_result *result;
    damage_list damage;
    bytes payload;
    lineage *lineages;
    size_t lineage_count;
    due_file *files; /* all of the store, each once; the first `due` in the order in which they are read */
    size_t file_count, file_capacity, due;
    verified_files done; /* not written yet */
    uint64_t begun_ns, written_ns, total, read;
    file_lock *reader; /* until the file is open */
} scrubbing;

/* ---- what there is ---- */

static ckd_status add_files(scrubbing *s, const manifest *m, const manifest_name *name, ckd_error *err) {
    if (s->file_count + m->file_count > s->file_capacity) {
        size_t capacity = 2 * (s->file_count + m->file_count);
        due_file *grown = realloc(s->files, capacity * sizeof(*grown));
        if (!grown) {
            return err_nomem(err, capacity * sizeof(*grown), "the files of a store");
        }
        s->files = grown;
        s->file_capacity = capacity;
    }
    for (size_t i = 0; i < m->file_count; i++) {
        s->files[s->file_count++] = (due_file){.file = m->files[i], .name = *name};
    }
    return CKD_OK;
}

static ckd_status add_manifest(scrubbing *s, const manifest_name *name, ckd_error *err) {
    manifest m;
    ckd_error why = {.offset = CKD_NO_OFFSET};
    ckd_status status = store_read_manifest(&m, s->store, name->run, name->step, name->generation, &why);
    if (status == CKD_E_NOT_FOUND) { /* it was collected meanwhile */
        return CKD_OK;
    }
    if (status != CKD_OK) {
        err_in_file(&why, status,
                    path_manifest(s->store->path, name->run, name->step, name->generation).text);
        return damage_note(&s->damage, status, &why, CKD_NO_OFFSET, "", err);
    }
    s->lineages[s->lineage_count++] = lineage_of(&m);
    status = add_files(s, &m, name, err);
    manifest_free(&m);
    return status;
}

static ckd_status read_manifests(scrubbing *s, ckd_error *err) {
    manifest_list list = {0};
    ckd_status status = manifests_read(&list, s->store, err);
    if (status == CKD_OK) {
        s->lineages = calloc(list.count + 1, sizeof(*s->lineages));
        status = s->lineages ? CKD_OK : err_nomem(err, list.count * sizeof(*s->lineages), "manifests");
    }
    for (size_t i = 0; i < list.count && status == CKD_OK; i++) {
        bool newest = i == 0 || !same_checkpoint_name(&list.items[i - 1], &list.items[i]);
        status = newest ? add_manifest(s, &list.items[i], err) : CKD_OK;
    }
    manifests_free(&list);
    return status;
}

static ckd_status check_notes(scrubbing *s, ckd_error *err) {
    notes n = {0};
    ckd_status status = notes_read(&n, s->store, err);
    for (size_t i = 0; i < n.count && status == CKD_OK; i++) {
        ckd_error why = {.offset = CKD_NO_OFFSET};
        status =
            damage_note(&s->damage, notes_why(&n.items[i], s->store, &why), &why, CKD_NO_OFFSET, "", err);
    }
    notes_free(&n);
    return status;
}

/* ---- which are due ---- */

static int by_id(const void *a, const void *b) {
    return memcmp(&((const due_file *)a)->file.id, &((const due_file *)b)->file.id, sizeof(ckd_id));
}

static int by_age(const void *a, const void *b) {
    const due_file *x = a, *y = b;
    int order = (x->verified_ns > y->verified_ns) - (x->verified_ns < y->verified_ns);
    return order ? order : by_id(a, b);
}

static int by_name(const void *name, const void *state) {
    return strcmp(name, ((const catalog_file_state *)state)->name);
}

/* Names of the catalog are hexadecimal ids: both are in the same order. A time to come is none: the clock was set back. */
static void look_up(scrubbing *s, uint64_t now) {
    size_t known_count, kept = 0;
    catalog_file_state *known = verified_recall(&known_count, s->store);
    if (s->file_count) {
        qsort(s->files, s->file_count, sizeof(*s->files), by_id);
    }
    for (size_t i = 0; i < s->file_count; i++) {
        if (kept && id_equal(&s->files[kept - 1].file.id, &s->files[i].file.id)) {
            continue;
        }
        char name[64];
        due_file *f = &s->files[kept++];
        *f = s->files[i];
        verified_name(name, &f->file.id);
        const catalog_file_state *k =
            known_count ? bsearch(name, known, known_count, sizeof(*known), by_name) : NULL;
        f->verified_ns = k && k->size == f->file.size && k->verified_ns <= now ? k->verified_ns : 0;
    }
    s->file_count = kept;
    free(known);
}

static void choose_due(scrubbing *s) {
    uint64_t now = clock_wall_ns(), longest = now / UINT64_C(1000000000);
    uint64_t older_s = s->options->older_than_s < longest ? s->options->older_than_s : longest;
    uint64_t before = now - older_s * UINT64_C(1000000000);
    look_up(s, now);
    if (s->file_count) {
        qsort(s->files, s->file_count, sizeof(*s->files), by_age);
    }
    while (s->due < s->file_count && s->files[s->due].verified_ns <= before) {
        s->total += s->files[s->due++].file.size;
    }
}

/* ---- reading them ---- */

static ckd_status tell(scrubbing *s, ckd_error *err) {
    const ckd_scrub_options *o = s->options;
    int stop = o->on_progress
                   ? o->on_progress(o->progress_context, s->read < s->total ? s->read : s->total, s->total)
                   : 0;
    return stop ? err_set(err, CKD_E_CANCELLED, "the scrub was cancelled; what it verified is remembered")
                : CKD_OK;
}

/* After each record: as slow as was asked for. */
static ckd_status after_record(void *context, uint64_t stored_bytes, ckd_error *err) {
    scrubbing *s = context;
    lock_release(s->reader);
    s->reader = NULL;
    s->read += stored_bytes;
    ckd_status status = tell(s, err);
    double rate = (double)s->options->bytes_per_s;
    uint64_t until = rate > 0 ? s->begun_ns + (uint64_t)((double)s->read / rate * 1e9) : 0;
    for (uint64_t now = clock_monotonic_ns(); now < until && status == CKD_OK; now = clock_monotonic_ns()) {
        clock_sleep_ns(until - now < NAP_NS ? until - now : NAP_NS);
        status = tell(s, err);
    }
    return status;
}

static ckd_status write_verified(ckd_store *store, ckd_error *err) {
    ckd_status status =
        store_refresh(store, err); /* which takes it along if there is anything else to write */
    if (status != CKD_OK || !store->verified.count) {
        return status;
    }
    status = catalog_begin(store->catalog, err);
    if (status == CKD_OK) {
        status = verified_write(store, err);
    }
    if (status != CKD_OK) {
        catalog_rollback(store->catalog);
        return status;
    }
    store->verified.count = 0;
    return catalog_commit(store->catalog, err);
}

/* What was verified, into the catalog. Who is told of damage must be told also if that fails. */
static void remember(scrubbing *s, uint32_t patience_ms) {
    file_lock *lock;
    ckd_error why = {0};
    if (!s->done.count) {
        return;
    }
    ckd_status status = store_lock_publish_within(&lock, s->store, patience_ms, &why);
    if (status == CKD_OK) {
        verified_hand_over(s->store, &s->done);
        pthread_mutex_lock(&s->store->mutex);
        status = write_verified(s->store, &why);
        pthread_mutex_unlock(&s->store->mutex);
        lock_release(lock);
        s->written_ns = clock_monotonic_ns();
    }
    if (status != CKD_OK && patience_ms) {
        store_message(s->store, "what was verified is not remembered: %s", why.message);
    }
}

/* Under the reader lock: is it still the store's? What was deleted meanwhile is gone together with its manifest. */
static bool is_listed(const scrubbing *s, const due_file *f) {
    return file_exists(path_manifest(s->store->path, f->name.run, f->name.step, f->name.generation).text);
}

static ckd_status check_one(scrubbing *s, const due_file *f, ckd_error *err) {
    char checkpoint[CKD_RUN_MAX + 32];
    file_check check = {.store = s->store,
                        .damage = &s->damage,
                        .lineages = s->lineages,
                        .lineage_count = s->lineage_count,
                        .payload = &s->payload,
                        .pace = after_record,
                        .pace_context = s};
    snprintf(checkpoint, sizeof(checkpoint), "%s@%llu", f->name.run, (unsigned long long)f->name.step);
    return check_named_file(&check, &f->file, checkpoint, err);
}

static ckd_status scrub_file(scrubbing *s, due_file *f, ckd_error *err) {
    ckd_verify_result *found = s->result->found;
    size_t damage = found->damage_count;
    uint64_t begun = clock_wall_ns(), before = s->read;
    ckd_status status = store_lock_reader(&s->reader, s->store, err);
    if (status != CKD_OK) {
        return status;
    }
    bool listed = is_listed(s, f);
    status = listed ? check_one(s, f, err) : CKD_OK;
    lock_release(s->reader);
    s->reader = NULL;
    s->read = before + f->file.size;
    if (status != CKD_OK || !listed) {
        return status;
    }
    found->files++;
    found->bytes += f->file.size;
    if (found->damage_count > damage) {
        return CKD_OK; /* it comes first again */
    }
    if (!s->done.count) {
        s->done.at_ns = begun; /* of the first of them: none was verified before */
    }
    f->verified_ns = begun;
    manifest one = {.files = &f->file, .file_count = 1};
    return verified_add(&s->done, &one, err);
}

static bool out_of_time(const scrubbing *s) {
    uint64_t seconds = s->options->max_time_s;
    return seconds && (clock_monotonic_ns() - s->begun_ns) / UINT64_C(1000000000) >= seconds;
}

static ckd_status scrub_files(scrubbing *s, size_t *at, ckd_error *err) {
    ckd_status status = tell(s, err);
    for (*at = 0; *at < s->due && status == CKD_OK; ++*at) {
        if (out_of_time(s) && *at > 0) {
            break;
        }
        status = scrub_file(s, &s->files[*at], err);
        if (clock_monotonic_ns() - s->written_ns > REMEMBER_NS) {
            remember(s, 0);
        }
    }
    return status;
}

/*
 * All parity files, as nobody remembers when one was read: from a group on that is drawn by lot, so that those behind it get their turn where there is never time for all. They are
 * read without the reader lock: what is removed meanwhile is no damage.
 */
static ckd_status scrub_parity(scrubbing *s, ckd_error *err) {
    parity_sets sets = {0};
    const ckd_scrub_options *o = s->options;
    pace p = {.bytes_per_s = o->bytes_per_s,
              .on_progress = o->on_progress,
              .context = o->progress_context,
              .what = "the scrub",
              .begun_ns = clock_monotonic_ns()};
    uint64_t lot = 0;
    ckd_status status = parity_sets_read(&sets, s->store, &s->damage, err);
    if (status == CKD_OK) {
        status = random_bytes(&lot, sizeof(lot), err);
    }
    for (size_t i = 0; i < sets.count && status == CKD_OK && !out_of_time(s); i++) {
        const parity_set *set = sets.items[(lot % sets.count + i) % sets.count];
        for (uint32_t row = 0; row < set->group.rows && status == CKD_OK; row++) {
            status = set->present >> row & 1 ? parity_check_row(set, row, s->store, &s->damage, &p, err)
                                             : parity_note_missing(set, row, s->store, &s->damage, err);
        }
    }
    parity_sets_free(&sets);
    return status;
}

static void sum_up(scrubbing *s, size_t at) {
    ckd_scrub_result *r = s->result;
    for (size_t i = at; i < s->due; i++) {
        r->files_left++;
        r->bytes_left += s->files[i].file.size;
    }
    r->oldest_ns = s->file_count ? s->files[0].verified_ns : 0;
    for (size_t i = 1; i < s->file_count; i++) {
        r->oldest_ns = s->files[i].verified_ns < r->oldest_ns ? s->files[i].verified_ns : r->oldest_ns;
    }
    r->found->checkpoints = s->lineage_count;
}

static ckd_status scrub(scrubbing *s, ckd_error *err) {
    size_t at = 0;
    ckd_status status = read_manifests(s, err);
    if (status == CKD_OK) {
        status = check_notes(s, err);
    }
    if (status != CKD_OK) {
        return status;
    }
    choose_due(s);
    status = scrub_files(s, &at, err);
    remember(s, s->store->options.lock_timeout_ms); /* also of a scrub that was cancelled */
    sum_up(s, at);
    if (status == CKD_OK && at == s->due) {
        status = scrub_parity(s, err);
    }
    return status == CKD_OK ? damage_spread(&s->damage, s->lineages, s->lineage_count, err) : status;
}

ckd_status ckd_store_scrub(ckd_scrub_result **out, ckd_store *store, const ckd_scrub_options *options,
                           ckd_error *err) {
    ckd_scrub_options o = CKD_SCRUB_OPTIONS_INIT;
    *out = NULL;
    if (options) {
        memcpy(&o, options, options->struct_size < sizeof(o) ? options->struct_size : sizeof(o));
    }
    ckd_status status = store_check_writable(store, err);
    if (status != CKD_OK) {
        return status;
    }
    scrubbing s = {.store = store, .options = &o, .result = calloc(1, sizeof(*s.result))};
    s.begun_ns = s.written_ns = clock_monotonic_ns();
    if (!s.result || !(s.result->found = calloc(1, sizeof(*s.result->found)))) {
        ckd_scrub_result_free(s.result);
        return err_nomem(err, sizeof(*s.result), "a scrub");
    }
    s.damage = (damage_list){.result = s.result->found, .store_path = store->path};
    status = scrub(&s, err);
    bytes_free(&s.payload);
    lineages_free(s.lineages, s.lineage_count);
    free(s.files);
    free(s.done.ids);
    if (status != CKD_OK) {
        ckd_scrub_result_free(s.result);
        return status;
    }
    *out = s.result;
    return CKD_OK;
}

void ckd_scrub_result_free(ckd_scrub_result *result) {
    if (result) {
        ckd_verify_result_free(result->found);
        free(result);
    }
}
