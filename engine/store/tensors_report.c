/* Adds up the tensors of all checkpoints, for a report. */
#include <stdio.h>
#include <stdlib.h>

#include "base/bytes.h"
#include "engine/store/tensors.h"

void add_capped(uint64_t *sum, uint64_t value) {
    *sum = value > INT64_MAX - *sum ? INT64_MAX : *sum + value;
}

/* ---- sums by run, tensor and role ---- */

typedef struct sum {
    size_t run; /* index in by_run */
    char *name; /* NULL: a free slot */
    ckd_tensor_usage usage;
} sum;

typedef struct sums {
    sum *slots; /* open addressing, at most half full */
    size_t count, capacity;
    size_t text; /* total bytes of the names */
} sums;

static sum *find_slot(const sums *s, size_t run, ckd_role role, const char *name, size_t size) {
    size_t at = (size_t)(hash64(name, size) + run * 0x9e3779b97f4a7c15u + role) & (s->capacity - 1);
    while (s->slots[at].name && (s->slots[at].run != run || s->slots[at].usage.role != role ||
                                 strcmp(s->slots[at].name, name) != 0)) {
        at = (at + 1) & (s->capacity - 1);
    }
    return &s->slots[at];
}

static ckd_status grow(sums *s, ckd_error *err) {
    if (2 * s->count < s->capacity) {
        return CKD_OK;
    }
    sums larger = {.capacity = s->capacity ? 2 * s->capacity : 1024, .count = s->count, .text = s->text};
    larger.slots = calloc(larger.capacity, sizeof(*larger.slots));
    if (!larger.slots) {
        return err_nomem(err, larger.capacity * sizeof(*larger.slots), "sums by tensor");
    }
    for (size_t i = 0; i < s->capacity; i++) {
        const sum *old = &s->slots[i];
        if (old->name) {
            *find_slot(&larger, old->run, old->usage.role, old->name, strlen(old->name)) = *old;
        }
    }
    free(s->slots);
    *s = larger;
    return CKD_OK;
}

static ckd_status sums_add(sums *s, size_t run, const ckd_tensor_usage *usage, ckd_error *err) {
    size_t size = strlen(usage->name);
    ckd_status status = grow(s, err);
    if (status != CKD_OK) {
        return status;
    }
    sum *slot = find_slot(s, run, usage->role, usage->name, size);
    if (!slot->name) {
        slot->name = strdup(usage->name);
        if (!slot->name) {
            return err_nomem(err, size, "a tensor's name");
        }
        slot->run = run;
        slot->usage = (ckd_tensor_usage){.role = usage->role};
        s->count++;
        s->text += size + 1;
    }
    add_capped(&slot->usage.checkpoints, usage->checkpoints);
    add_capped(&slot->usage.elements, usage->elements);
    add_capped(&slot->usage.raw_bytes, usage->raw_bytes);
    add_capped(&slot->usage.stored_bytes, usage->stored_bytes);
    return CKD_OK;
}

static void sums_free(sums *s) {
    for (size_t i = 0; i < s->capacity; i++) {
        free(s->slots[i].name);
    }
    free(s->slots);
}

/* ---- reading ---- */

/* One checkpoint of by_checkpoint. */
typedef struct report_item {
    size_t run;  /* index in by_run */
    bool failed; /* it must be read again by the thread that may send messages */
} report_item;

typedef struct reading {
    ckd_report *report;
    ckd_store *store;
    report_item *items;
    pthread_mutex_t mutex; /* guards `sums` and the report */
    sums sums;
} reading;

static void tensor_usage(ckd_tensor_usage *out, const view_tensor *t) {
    *out = (ckd_tensor_usage){.name = t->tensor->name, .role = t->tensor->role, .checkpoints = 1};
    for (size_t i = 0; i < t->shard_count; i++) {
        view_totals totals = {0};
        view_add_shard(&totals, &t->shards[i]);
        out->elements += t->shards[i].elements;
        out->stored_bytes += totals.stored_bytes;
    }
    out->raw_bytes = out->elements * ckd_dtype_size(t->tensor->dtype);
}

/* The caller holds the mutex. */
static ckd_status add_view(reading *r, size_t index, const view *v, ckd_error *err) {
    ckd_role_bytes *roles = r->report->roles[index].roles;
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < v->tensor_count && status == CKD_OK; i++) {
        ckd_tensor_usage usage;
        tensor_usage(&usage, &v->tensors[i]);
        ckd_role_bytes *role = &roles[usage.role];
        add_capped(&role->elements, usage.elements);
        add_capped(&role->raw_bytes, usage.raw_bytes);
        add_capped(&role->stored_bytes, usage.stored_bytes);
        status = sums_add(&r->sums, r->items[index].run, &usage, err);
    }
    return status;
}

static ckd_status read_one(reading *r, size_t index, ckd_error *err) {
    view_cache cache;
    const view *v;
    ckd_status status = tensors_open(&cache, &v, r->store, &r->report->by_checkpoint[index].id, err);
    if (status == CKD_OK) {
        pthread_mutex_lock(&r->mutex);
        status = add_view(r, index, v, err);
        pthread_mutex_unlock(&r->mutex);
    }
    views_free(&cache);
    return status == CKD_E_NOT_FOUND ? CKD_OK : status; /* deleted meanwhile */
}

static ckd_status read_task(void *context, size_t index, uint32_t worker, ckd_error *err) {
    reading *r = context;
    (void)worker;
    ckd_error why = {0};
    ckd_status status = read_one(r, index, &why);
    r->items[index].failed = tensors_may_skip(status);
    return r->items[index].failed ? CKD_OK : err_from(err, status, &why);
}

static ckd_status read_all(reading *r, ckd_error *err) {
    size_t count = r->report->checkpoint_count;
    ckd_status status = pool_run(r->store->pool, count, read_task, r, err);
    for (size_t i = 0; i < count && status == CKD_OK; i++) {
        ckd_error why = {.offset = CKD_NO_OFFSET};
        if (!r->items[i].failed) {
            continue;
        }
        status = read_one(r, i, &why);
        if (tensors_may_skip(status)) {
            tensors_skip(r->store, &r->report->by_checkpoint[i], &why);
            status = CKD_OK;
        }
        err_from(err, status, &why);
    }
    return status;
}

/* ---- writing the report ---- */

/* Both lists are in the same order. */
static ckd_status find_runs(reading *r, ckd_error *err) {
    const ckd_report *report = r->report;
    size_t count = report->checkpoint_count;
    r->items = calloc(count + 1, sizeof(*r->items));
    if (!r->items) {
        return err_nomem(err, count * sizeof(*r->items), "checkpoints to read");
    }
    for (size_t i = 0, run = 0; i < count; i++) {
        while (strcmp(report->by_run[run].name, report->by_checkpoint[i].run) != 0) {
            run++;
        }
        r->items[i].run = run;
    }
    return CKD_OK;
}

static int by_run_then_name(const void *a, const void *b) {
    const sum *x = *(const sum *const *)a, *y = *(const sum *const *)b;
    if (x->run != y->run) {
        return x->run < y->run ? -1 : 1;
    }
    int order = strcmp(x->name, y->name);
    return order ? order : (x->usage.role > y->usage.role) - (x->usage.role < y->usage.role);
}

static const sum **sorted_sums(const sums *s) {
    const sum **sorted = malloc((s->count + 1) * sizeof(*sorted));
    for (size_t i = 0, n = 0; sorted && i < s->capacity; i++) {
        if (s->slots[i].name) {
            sorted[n++] = &s->slots[i];
        }
    }
    if (sorted) {
        qsort(sorted, s->count, sizeof(*sorted), by_run_then_name);
    }
    return sorted;
}

/* Puts rows and names into one allocation. Names of runs point into by_run. */
static ckd_status set_by_tensor(ckd_report *report, const sums *s, ckd_error *err) {
    const sum **sorted = sorted_sums(s);
    ckd_tensor_usage *rows = sorted ? malloc(s->count * sizeof(*rows) + s->text + 1) : NULL;
    if (!rows) {
        free(sorted);
        return err_nomem(err, s->count * sizeof(*rows) + s->text, "sums by tensor");
    }
    char *text = (char *)(rows + s->count);
    for (size_t i = 0; i < s->count; i++) {
        size_t size = strlen(sorted[i]->name) + 1;
        memcpy(text, sorted[i]->name, size);
        rows[i] = sorted[i]->usage;
        rows[i].run = report->by_run[sorted[i]->run].name;
        rows[i].name = text;
        text += size;
    }
    free(sorted);
    report->by_tensor = rows;
    report->tensor_count = s->count;
    return CKD_OK;
}

ckd_status tensors_report(ckd_report *report, ckd_store *store, ckd_error *err) {
    reading r = {.report = report, .store = store};
    file_lock *lock;
    ckd_status status = store_lock_reader(&lock, store, err);
    if (status != CKD_OK) {
        return status;
    }
    pthread_mutex_init(&r.mutex, NULL);
    report->roles = calloc(report->checkpoint_count + 1, sizeof(*report->roles));
    if (!report->roles) {
        status = err_nomem(err, report->checkpoint_count * sizeof(*report->roles), "sums by role");
    }
    THEN(status, find_runs(&r, err));
    THEN(status, read_all(&r, err));
    THEN(status, set_by_tensor(report, &r.sums, err));
    pthread_mutex_destroy(&r.mutex);
    lock_release(lock);
    sums_free(&r.sums);
    free(r.items);
    return status;
}
