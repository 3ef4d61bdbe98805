/* Makes parity: first makes the missing groups, one by one, then removes groups that are no longer useful. */
#include "engine/integrity/internal.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/vocabulary.h"

/* The result of reading a live file in this call. */
typedef enum file_state { UNREAD, RIGHT, DAMAGED, GONE } file_state;

typedef struct making {
    ckd_store *store;
    const ckd_parity_options *options;
    ckd_parity_result *result;
    damage_list damage;
    live_files files;
    file_state *states; /* by index of the file */
    parity_sets sets;
    file_state *set_states; /* by index of the group: the state of its parity and of all that it covers */
    setting_list settings;
    parity_plan plan;
    throttled_check check;
    rate_limiter limiter;
} making;

/* ---- settings ---- */

static ckd_status publish_setting(const ckd_store *store, const parity_setting *setting,
                                  const setting_name *name, ckd_error *err) {
    bytes data = {0};
    parity_setting p = *setting;
    p.generation = name->generation;
    parity_encode(&data, &store->id, &p);
    ckd_status status = data.failed ? err_nomem(err, data.size, "a parity setting") : CKD_OK;
    THEN(status, settings_publish(store, name, &data, err));
    bytes_free(&data);
    return status;
}

static ckd_status store_setting(const making *m, ckd_error *err) {
    const ckd_parity_options *o = m->options;
    parity_setting setting = {
        .set_ns = clock_wall_ns(), .data = o->off ? 0 : o->data, .parity = o->off ? 0 : o->parity};
    const char *name = o->run ? o->run : POLICY_OF_ALL;
    file_lock *lock;
    setting_name next;
    stored_setting before;
    snprintf(setting.run, sizeof(setting.run), "%s", o->run ? o->run : "");
    ckd_status status = store_lock_publish(&lock, m->store, err);
    if (status != CKD_OK) {
        return status;
    }
    status = settings_next(&next, &before, m->store, METADATA_PARITY, name, err);
    bool same = status == CKD_OK && before.name.kind && before.status == CKD_OK &&
                before.parity.data == setting.data && before.parity.parity == setting.parity;
    if (status == CKD_OK && !same) {
        status = publish_setting(m->store, &setting, &next, err);
    }
    lock_release(lock);
    return status;
}

static bool any_setting(const setting_list *n) {
    for (size_t i = 0; i < n->count; i++) {
        if (n->items[i].name.kind == METADATA_PARITY) {
            return true;
        }
    }
    return false;
}

/* ---- files ---- */

/* Reads each file once. A second reading would find no new damage, and the file would seem to be intact. */
static ckd_status check_file(file_state *out, making *m, const live_file *f, ckd_error *err) {
    file_state *state = &m->states[f - m->files.items];
    ckd_status status = CKD_OK;
    if (*state == UNREAD) {
        bool right, listed;
        status = throttled_check_file(&right, &listed, &m->check, f, err);
        if (status == CKD_OK) {
            *state = right ? RIGHT : listed ? DAMAGED : GONE;
        }
    }
    *out = *state;
    return status;
}

/* ---- one group ---- */

/* Drops members that cannot be covered. */
static ckd_status check_members(making *m, parity_group *g, ckd_error *err) {
    ckd_status status = CKD_OK;
    size_t kept = 0;
    for (size_t i = 0; i < g->member_count && status == CKD_OK; i++) {
        const live_file *f = live_files_find(&m->files, &g->members[i].file);
        file_state state;
        status = check_file(&state, m, f, err);
        if (status == CKD_OK && state == RIGHT) {
            g->members[kept] = g->members[i];
            g->members[kept].column = (uint32_t)kept;
            kept++;
        }
    }
    g->member_count = kept;
    return status;
}

static ckd_status publish_group(bool *done, const ckd_store *store, const parity_group *g, ckd_error *err) {
    file_lock *lock;
    *done = false;
    ckd_status status = store_lock_publish(&lock, store, err);
    if (status == CKD_OK) {
        status = parity_publish(done, store, g, err);
        lock_release(lock);
    }
    return status;
}

/* Reports a missing library as STATE, because the stored data are not at fault. */
static ckd_status report_missing_library(ckd_status status, ckd_error *err) {
    ckd_error why = {.offset = CKD_NO_OFFSET};
    return status == CKD_E_UNSUPPORTED && erasure_ready(&why) != CKD_OK
               ? err_set(err, CKD_E_STATE, "%s", why.message)
               : status;
}

static ckd_status make_group(making *m, parity_group *g, ckd_error *err) {
    uint32_t rows = (UINT32_C(1) << g->rows) - 1;
    bool done = false;
    ckd_status status = check_members(m, g, err);
    if (status != CKD_OK || g->member_count == 0) {
        return status;
    }
    g->created_ns = clock_wall_ns();
    status = ckd_id_new(&g->id, err);
    THEN(status, report_missing_library(parity_write(m->store, g, rows, &m->limiter, err), err));
    if (status == CKD_E_NOT_FOUND) { /* a member was collected since its check */
        return CKD_OK;
    }
    if (status == CKD_OK) {
        status = publish_group(&done, m->store, g, err);
        if (!done) {
            parity_write_undo(m->store, g, rows);
        }
    }
    if (done) {
        ckd_parity_result *r = m->result;
        r->groups++;
        r->files += g->member_count;
        r->parity_bytes += g->rows * parity_file_size(g);
        for (size_t i = 0; i < g->member_count; i++) {
            r->file_bytes += g->members[i].size;
        }
    }
    return status;
}

/* ---- groups that are no longer of use ---- */

static parity_inputs inputs_of(const making *m) {
    return (parity_inputs){.store = m->store, .files = &m->files, .sets = &m->sets, .settings = &m->settings};
}

/* The live file that a group covers by this member; NULL: there is none. */
static const live_file *covered_by(const parity_member *member, const live_files *files) {
    const live_file *f = live_files_find(files, &member->file);
    return f && f->file.size == member->size && hash128_equal(&f->file.root, &member->root) ? f : NULL;
}

/* Does the group cover a damaged file? Then it stays until a repair, even if another group covers the file, too. */
static ckd_status covers_damaged(bool *out, making *m, const parity_set *s, ckd_error *err) {
    ckd_status status = CKD_OK;
    *out = false;
    for (size_t i = 0; i < s->group.member_count && !*out && status == CKD_OK; i++) {
        const live_file *f = covered_by(&s->group.members[i], &m->files);
        file_state state;
        if (f) {
            m->limiter.total += m->states[f - m->files.items] == UNREAD ? f->file.size : 0;
            status = check_file(&state, m, f, err);
            *out = status == CKD_OK && state == DAMAGED;
        }
    }
    return status;
}

/* Reads a whole group once. A missing row was reported elsewhere and is skipped. */
static ckd_status check_set(making *m, const parity_set *s, ckd_error *err) {
    bool damaged;
    if (m->set_states[s->place] != UNREAD) {
        return CKD_OK;
    }
    ckd_status status = covers_damaged(&damaged, m, s, err);
    size_t before = m->damage.result->damage_count;
    m->limiter.total += s->bytes;
    for (uint32_t row = 0; row < s->group.rows && status == CKD_OK; row++) {
        if (s->present >> row & 1) {
            status = parity_check_row(s, row, m->store, &m->damage, &m->limiter, err);
        }
    }
    damaged = status != CKD_OK || damaged || m->damage.result->damage_count > before;
    m->set_states[s->place] = damaged ? DAMAGED : RIGHT;
    return status;
}

/*
 * *right: each file of the group is covered by another group that this call has read and found intact, or needs no
 * cover by its setting. read: reads groups that were not read yet.
 */
static ckd_status check_stand_ins(bool *right, making *m, const parity_set *s, const parity_inputs *inputs,
                                  bool read, ckd_error *err) {
    ckd_status status = CKD_OK;
    *right = true;
    for (size_t i = 0; i < s->group.member_count && *right && status == CKD_OK; i++) {
        const live_file *f = covered_by(&s->group.members[i], inputs->files);
        const parity_set *best = NULL;
        status = f ? parity_plan_best(&best, f, inputs, err) : CKD_OK;
        if (status == CKD_OK && best && read) {
            status = check_set(m, best, err);
        }
        *right = status == CKD_OK && (!best || m->set_states[best->place] == RIGHT);
    }
    return status;
}

/*
 * Rot changes no name and no size. So before a group goes, the files that it covers are read, and so are the groups
 * that cover them instead.
 */
static ckd_status find_useless(bool *useless, making *m, ckd_error *err) {
    const parity_inputs inputs = inputs_of(m);
    bool *needed = calloc(m->sets.count + 1, sizeof(*needed));
    ckd_status status =
        needed ? parity_plan_needed(needed, &inputs, err) : err_nomem(err, m->sets.count, "parity groups");
    for (size_t i = 0; i < m->sets.count && status == CKD_OK; i++) {
        if (!needed[i]) {
            bool safe = false;
            status = covers_damaged(&needed[i], m, m->sets.items[i], err);
            if (status == CKD_OK && !needed[i]) {
                status = check_stand_ins(&safe, m, m->sets.items[i], &inputs, true, err);
            }
            needed[i] = !safe;
        }
        useless[i] = !needed[i];
    }
    free(needed);
    return status;
}

/* Has this call read all files that the group covers now, and found them intact? */
static bool was_read(const making *m, const parity_set *s, const live_files *now) {
    bool read = true;
    for (size_t i = 0; i < s->group.member_count && read; i++) {
        const parity_member *member = &s->group.members[i];
        const live_file *f = covered_by(member, &m->files);
        read = !covered_by(member, now) || (f && m->states[f - m->files.items] == RIGHT);
    }
    return read;
}

/* Sets needed[i] for groups that are useful by these inputs, which were read under the publish lock. */
static ckd_status find_needed(bool *needed, making *m, const parity_inputs *inputs, ckd_error *err) {
    size_t lost = 0;
    ckd_status status = parity_plan_needed(needed, inputs, err);
    THEN(status, parity_plan_keep_lost(needed, &lost, inputs, err));
    for (size_t i = 0; i < m->sets.count && status == CKD_OK; i++) {
        bool safe = !needed[i] && was_read(m, m->sets.items[i], inputs->files);
        if (safe) {
            status = check_stand_ins(&safe, m, m->sets.items[i], inputs, false, err);
        }
        needed[i] = !safe;
    }
    if (lost) {
        store_message(
            m->store,
            "%zu parity groups stay, as they may rebuild files of checkpoints whose manifests are lost: run "
            "ckptdelta repair",
            lost);
    }
    return status;
}

/*
 * Checkpoints and settings may have changed since they were read. A listing may also lack both generations of a
 * manifest that was replaced during the reading. So a group is removed only if it is also useless by a second reading
 * under the publish lock, which the caller holds.
 */
static ckd_status look_again(bool *useless, making *m, damage_list *reread, ckd_error *err) {
    live_files files = {0};
    setting_list settings = {0};
    const parity_inputs inputs = {
        .store = m->store, .files = &files, .sets = &m->sets, .settings = &settings};
    bool *needed = calloc(m->sets.count + 1, sizeof(*needed));
    ckd_status status = needed ? settings_read_kind(&settings, m->store, METADATA_PARITY, err)
                               : err_nomem(err, m->sets.count, "parity groups");
    THEN(status, live_files_read(&files, m->store, reread, err));
    THEN(status, find_needed(needed, m, &inputs, err));
    for (size_t i = 0; i < m->sets.count && status == CKD_OK; i++) {
        useless[i] = useless[i] && !needed[i] && !files.incomplete;
    }
    free(needed);
    settings_free(&settings);
    live_files_free(&files);
    return status;
}

static ckd_status remove_useless(making *m, bool *useless, damage_list *reread, ckd_error *err) {
    file_lock *lock;
    ckd_status status = store_lock_publish(&lock, m->store, err);
    if (status != CKD_OK) {
        return status;
    }
    status = look_again(useless, m, reread, err);
    for (size_t i = 0; i < m->sets.count && status == CKD_OK; i++) {
        m->result->removed_groups += useless[i];
        m->result->removed_bytes += useless[i] ? m->sets.items[i]->bytes : 0;
    }
    if (status == CKD_OK && m->result->removed_groups) {
        status = parity_sets_remove(&m->sets, useless, m->store, err);
    }
    lock_release(lock);
    return status;
}

/* The caller has read all manifests. Without one of them, it would not be known which groups are useful. */
static ckd_status clean_up(making *m, ckd_error *err) {
    damage_list reread = {.result = calloc(1, sizeof(ckd_verify_result)), .store_path = m->store->path};
    if (!reread.result) {
        return err_nomem(err, sizeof(ckd_verify_result), "parity groups");
    }
    parity_sets_free(&m->sets);
    ckd_status status = parity_sets_read(&m->sets, m->store, &reread, err);
    bool *useless = status == CKD_OK ? calloc(m->sets.count + 1, sizeof(*useless)) : NULL, any = false;
    m->set_states = calloc(m->sets.count + 1, sizeof(*m->set_states));
    if (status == CKD_OK && !(useless && m->set_states)) {
        status = err_nomem(err, m->sets.count, "parity groups");
    }
    THEN(status, find_useless(useless, m, err));
    for (size_t i = 0; i < m->sets.count && status == CKD_OK; i++) {
        any = any || useless[i];
    }
    if (status == CKD_OK && any) {
        status = remove_useless(m, useless, &reread, err);
    }
    free(useless);
    ckd_verify_result_free(reread.result); /* the damage was reported already */
    return status;
}

/* ---- the whole call ---- */

/* A dry run does not store the requested setting. This adds it to the list instead. */
static ckd_status pretend_setting(making *m, ckd_error *err) {
    const ckd_parity_options *o = m->options;
    stored_setting *grown = realloc(m->settings.items, (m->settings.count + 1) * sizeof(*grown));
    if (!grown) {
        return err_nomem(err, sizeof(*grown), "a parity setting");
    }
    m->settings.items = grown;
    memmove(grown + 1, grown, m->settings.count * sizeof(*grown));
    grown[0] =
        (stored_setting){.name.kind = METADATA_PARITY, .parity = {.data = o->data, .parity = o->parity}};
    snprintf(grown[0].name.name, sizeof(grown[0].name.name), "%s", o->run ? o->run : POLICY_OF_ALL);
    m->settings.count++;
    return CKD_OK;
}

static ckd_status read_state(making *m, ckd_error *err) {
    ckd_status status = settings_read_kind(&m->settings, m->store, METADATA_PARITY, err);
    if (status == CKD_OK && m->options->dry_run && m->options->data) {
        status = pretend_setting(m, err);
    }
    if (status == CKD_OK && !any_setting(&m->settings)) {
        return err_set(
            err, CKD_E_NOT_FOUND,
            "no parity is configured for this store: set it once (ckptdelta parity STORE --group 8+1)");
    }
    THEN(status, live_files_read(&m->files, m->store, &m->damage, err));
    if (status == CKD_OK) {
        m->states = calloc(m->files.count + 1, sizeof(*m->states));
        status = m->states ? CKD_OK : err_nomem(err, m->files.count, "the files of a store");
    }
    THEN(status, parity_sets_read(&m->sets, m->store, &m->damage, err));
    const parity_inputs inputs = inputs_of(m);
    THEN(status, parity_plan_make(&m->plan, &inputs, m->options->run, err));
    return status;
}

static void count_plan(making *m) {
    for (size_t i = 0; i < m->plan.count; i++) {
        m->result->parity_bytes += m->plan.items[i].rows * parity_file_size(&m->plan.items[i]);
    }
    m->result->groups = m->plan.count;
    m->result->files = m->plan.files;
    m->result->file_bytes = m->plan.file_bytes;
}

static ckd_status make(making *m, ckd_error *err) {
    const ckd_parity_options *o = m->options;
    bool has_setting = o->data || o->off;
    ckd_status status = has_setting && !o->dry_run ? store_setting(m, err) : CKD_OK;
    THEN(status, read_state(m, err));
    if (status == CKD_OK && o->dry_run) {
        count_plan(m);
        return CKD_OK;
    }
    m->limiter.total = 2 * m->plan.file_bytes; /* each byte is checked, then covered */
    for (size_t i = 0; i < m->plan.count && status == CKD_OK; i++) {
        status = make_group(m, &m->plan.items[i], err);
    }
    if (status == CKD_OK && !m->files.incomplete) {
        status = clean_up(m, err);
    }
    return status == CKD_OK ? damage_add_dependents(&m->damage, m->files.dependency_infos,
                                                    m->files.dependency_info_count, err)
                            : status;
}

static ckd_status check_options(const ckd_parity_options *o, ckd_error *err) {
    bool unset = o->data == 0 && o->parity == 0;
    bool valid =
        o->data >= 1 && o->data <= CKD_PARITY_DATA_MAX && o->parity >= 1 && o->parity <= CKD_PARITY_MAX;
    if ((!unset && !valid) || (valid && o->off)) {
        return err_set(err, CKD_E_INVALID,
                       "a parity group has 1 to %d files and 1 to %d files of parity, such as 8+1",
                       CKD_PARITY_DATA_MAX, CKD_PARITY_MAX);
    }
    if (o->run && !run_name_valid(o->run)) {
        return err_set(err, CKD_E_INVALID, "'%.60s' is not a valid run name", o->run);
    }
    return valid && o->parity > 1 ? report_missing_library(erasure_ready(err), err) : CKD_OK;
}

static void making_free(making *m) {
    parity_plan_free(&m->plan);
    parity_sets_free(&m->sets);
    live_files_free(&m->files);
    free(m->states);
    free(m->set_states);
    settings_free(&m->settings);
    bytes_free(&m->check.payload);
}

ckd_status ckd_store_parity(ckd_parity_result **out, ckd_store *store, const ckd_parity_options *options,
                            ckd_error *err) {
    ckd_parity_options o = CKD_PARITY_OPTIONS_INIT;
    file_lock *lock = NULL;
    *out = NULL;
    ckd_status status = COPY_OPTIONS(&o, options, "ckd_parity_options", err);
    THEN(status, store_check_writable(store, err));
    THEN(status, check_options(&o, err));
    if (status != CKD_OK) {
        return status;
    }
    making m = {.store = store, .options = &o, .result = calloc(1, sizeof(*m.result))};
    if (!m.result || !(m.result->found = calloc(1, sizeof(*m.result->found)))) {
        free(m.result);
        return err_nomem(err, sizeof(*m.result), "making parity");
    }
    m.damage = (damage_list){.result = m.result->found, .store_path = store->path};
    m.limiter = (rate_limiter){.bytes_per_s = o.bytes_per_s,
                               .on_progress = o.on_progress,
                               .context = o.progress_context,
                               .cancelled = "making parity was cancelled",
                               .begun_ns = clock_monotonic_ns()};
    m.check = (throttled_check){store, &m.damage, &m.files, &m.limiter, {0}, NULL};
    status = o.dry_run ? CKD_OK : parity_lock(&lock, store, err);
    THEN(status, make(&m, err));
    lock_release(lock);
    making_free(&m);
    if (status != CKD_OK) {
        ckd_parity_result_free(m.result);
        return status;
    }
    *out = m.result;
    return CKD_OK;
}

void ckd_parity_result_free(ckd_parity_result *result) {
    if (result) {
        ckd_verify_result_free(result->found);
        free(result);
    }
}
