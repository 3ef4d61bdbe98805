/* Intents, parts, tombstones, the deletion mark and the identity of the store: codec/FORMAT.md, "Metadata files". */
#include <stdlib.h>

#include "codec/metadata/metadata.h"

void intent_encode(bytes *to, const ckd_id *store, const intent *in) {
    size_t start = metadata_begin(to, METADATA_INTENT, store, 0, 0);
    wire_put_id(to, &in->id);
    bytes_put_string(to, in->run);
    bytes_put_u64(to, in->step);
    bytes_put_u32(to, in->rank);
    bytes_put_u32(to, in->world);
    metadata_put_files(to, in->files, in->file_count);
    metadata_put_ids(to, in->dependencies, in->dependency_count);
    metadata_end(to, start);
}

ckd_status intent_decode(intent *out, const ckd_id *store, const void *data, size_t size, const char *path,
                         ckd_error *err) {
    metadata_reader n = metadata_open(METADATA_INTENT, store, data, size, path, err);
    *out = (intent){0};
    metadata_check_no_generation(&n);
    out->id = metadata_take_id(&n);
    metadata_take_run(&n, out->run);
    out->step = metadata_take_step(&n);
    out->rank = reader_u32(&n.in);
    out->world = reader_u32(&n.in);
    metadata_check_rank(&n, out->rank, out->world);
    out->files = metadata_take_files(&n, &out->file_count);
    out->dependencies = metadata_take_ids(&n, &out->dependency_count);
    ckd_status status = metadata_close(&n, NULL, 0);
    if (status != CKD_OK) {
        intent_free(out);
    }
    return status;
}

void intent_free(intent *in) {
    free(in->files);
    free(in->dependencies);
    *in = (intent){0};
}

static void put_times(bytes *to, const rank_part *p) {
    bytes_put_u64(to, p->began_ns);
    bytes_put_u32(to, p->stage_count);
    for (uint32_t i = 0; i < p->stage_count; i++) {
        const ckd_stage_times *s = &p->stages[i];
        bytes_put_u32(to, (uint32_t)s->stage);
        bytes_put_u64(to, s->begin_ns);
        bytes_put_u64(to, s->end_ns);
        bytes_put_u64(to, s->work_ns);
        bytes_put_u64(to, s->bytes);
    }
}

/* Reads a number that the catalog can hold. */
static uint64_t take_figure(metadata_reader *n) {
    uint64_t figure = reader_u64(&n->in);
    if (figure > INT64_MAX) {
        metadata_fail(n, CKD_E_CORRUPT, "a time or size is out of range");
    }
    return figure;
}

/* Skips stages unknown to this build. */
static void take_times(metadata_reader *n, rank_part *out) {
    out->began_ns = take_figure(n);
    uint32_t count = reader_u32(&n->in);
    if (count > PART_STAGES_MAX) {
        metadata_fail(n, CKD_E_CORRUPT, "there are too many stages");
    }
    for (uint32_t i = 0; i < count && n->status == CKD_OK && !n->in.failed; i++) {
        uint32_t stage = reader_u32(&n->in);
        ckd_stage_times s = {0};
        s.begin_ns = take_figure(n);
        s.end_ns = take_figure(n);
        s.work_ns = take_figure(n);
        s.bytes = take_figure(n);
        if (s.end_ns < s.begin_ns) {
            metadata_fail(n, CKD_E_CORRUPT, "a stage ends before it begins");
        }
        if (stage >= CKD_STAGE_SNAPSHOT && stage <= CKD_STAGE_LAST) {
            s.stage = (ckd_stage)stage;
            out->stages[out->stage_count++] = s;
        }
    }
}

static void put_options(bytes *to, const rank_part *p) {
    to->failed = to->failed || p->options_size > PART_OPTIONS_MAX;
    bytes_put_u32(to, (uint32_t)p->options_size);
    bytes_put(to, p->options, p->options_size);
}

static void take_options(metadata_reader *n, rank_part *out) {
    size_t size = 0;
    uint8_t *options = metadata_take_array(n, &size, 1, 1);
    const void *from = options ? reader_take(&n->in, size) : NULL;
    if (size == 0 || size > PART_OPTIONS_MAX) {
        metadata_fail(n, CKD_E_CORRUPT, "the rank's options are missing or too long");
    }
    if (from) {
        memcpy(options, from, size);
    }
    out->options = options;
    out->options_size = size;
}

void part_encode(bytes *to, const ckd_id *store, const rank_part *p) {
    uint32_t features = (p->began_ns ? METADATA_TIMES : 0) | (p->options ? METADATA_OPTIONS : 0);
    size_t start = metadata_begin(to, METADATA_PART, store, 0, features);
    wire_put_id(to, &p->checkpoint);
    bytes_put_u32(to, p->rank);
    bytes_put_u32(to, p->world);
    metadata_put_file(to, &p->file);
    metadata_put_ids(to, p->dependencies, p->dependency_count);
    if (p->began_ns) {
        put_times(to, p);
    }
    if (p->options) {
        put_options(to, p);
    }
    metadata_end(to, start);
}

ckd_status part_decode(rank_part *out, const ckd_id *store, const void *data, size_t size, ckd_error *err) {
    metadata_reader n = metadata_open(METADATA_PART, store, data, size, NULL, err);
    *out = (rank_part){0};
    metadata_check_no_generation(&n);
    out->checkpoint = metadata_take_id(&n);
    out->rank = reader_u32(&n.in);
    out->world = reader_u32(&n.in);
    metadata_check_rank(&n, out->rank, out->world);
    out->file = metadata_take_file(&n);
    out->dependencies = metadata_take_ids(&n, &out->dependency_count);
    if (n.features & METADATA_TIMES) {
        take_times(&n, out);
    }
    if (n.features & METADATA_OPTIONS) {
        take_options(&n, out);
    }
    ckd_status status = metadata_close(&n, NULL, 0);
    if (status != CKD_OK) {
        part_free(out);
    }
    return status;
}

void part_free(rank_part *p) {
    free(p->dependencies);
    free(p->options);
    *p = (rank_part){0};
}

void tombstone_encode(bytes *to, const ckd_id *store, const tombstone *t) {
    size_t start = metadata_begin(to, METADATA_TOMBSTONE, store, t->generation, 0);
    wire_put_id(to, &t->checkpoint);
    bytes_put_string(to, t->run);
    bytes_put_u64(to, t->step);
    bytes_put_u64(to, t->deleted_ns);
    bytes_put_u64(to, t->until_ns);
    metadata_end(to, start);
}

ckd_status tombstone_decode(tombstone *out, const ckd_id *store, const void *data, size_t size,
                            const char *path, ckd_error *err) {
    metadata_reader n = metadata_open(METADATA_TOMBSTONE, store, data, size, path, err);
    *out = (tombstone){0};
    out->generation = n.generation;
    out->checkpoint = metadata_take_id(&n);
    metadata_take_run(&n, out->run);
    out->step = metadata_take_step(&n);
    out->deleted_ns = reader_u64(&n.in);
    out->until_ns = reader_u64(&n.in);
    return metadata_close(&n, out, sizeof(*out));
}

void deletions_encode(bytes *to, const ckd_id *store, const ckd_id *mark) {
    size_t start = metadata_begin(to, METADATA_DELETIONS, store, 0, 0);
    wire_put_id(to, mark);
    metadata_end(to, start);
}

ckd_status deletions_decode(ckd_id *out, const ckd_id *store, const void *data, size_t size, const char *path,
                            ckd_error *err) {
    metadata_reader n = metadata_open(METADATA_DELETIONS, store, data, size, path, err);
    *out = (ckd_id){0};
    metadata_check_no_generation(&n);
    *out = metadata_take_id(&n);
    return metadata_close(&n, out, sizeof(*out));
}

void store_identity_encode(bytes *to, const store_identity *s) {
    size_t start = metadata_begin(to, METADATA_STORE, &s->id, 0, 0);
    bytes_put_u64(to, s->created_ns);
    metadata_end(to, start);
}

ckd_status store_identity_decode(store_identity *out, const void *data, size_t size, const char *path,
                                 ckd_error *err) {
    metadata_reader n = metadata_open(METADATA_STORE, NULL, data, size, path, err);
    *out = (store_identity){0};
    metadata_check_no_generation(&n);
    if (wire_id_zero(&n.store)) {
        metadata_fail(&n, CKD_E_CORRUPT, "the store's identity is zero");
    }
    out->id = n.store;
    out->created_ns = reader_u64(&n.in);
    return metadata_close(&n, out, sizeof(*out));
}
