/* The manifest: codec/FORMAT.md, "Manifest". */
#include <stdlib.h>
#include <string.h>

#include "codec/metadata/metadata.h"

static void put_roles(bytes *to, const role_total *roles, size_t count) {
    bytes_put_u32(to, (uint32_t)count);
    for (size_t i = 0; i < count; i++) {
        bytes_put_u32(to, roles[i].role);
        bytes_put_u64(to, roles[i].tensors);
        bytes_put_u64(to, roles[i].raw_bytes);
        bytes_put_u64(to, roles[i].stored_bytes);
    }
}

void manifest_encode(bytes *to, const ckd_id *store, const manifest *m) {
    const ckd_checkpoint *c = &m->checkpoint;
    bool names_older = m->dependency_count && !m->own_only;
    uint32_t features = (c->fidelity == CKD_EXACT ? 0 : METADATA_LOSSY) | (names_older ? METADATA_OLDER : 0) |
                        (c->suspect ? METADATA_SUSPECT : 0);
    size_t start = metadata_begin(to, METADATA_MANIFEST, store, c->generation, features);
    wire_put_id(to, &c->id);
    wire_put_id(to, &c->parent);
    wire_put_id(to, &c->resumed_from);
    wire_put_id(to, &m->branch_origin);
    bytes_put_string(to, c->run);
    bytes_put_u64(to, c->step);
    bytes_put_u16(to, (uint16_t)c->kind);
    bytes_put_u16(to, (uint16_t)c->fidelity);
    bytes_put_u32(to, c->lossy_resumes);
    bytes_put_u32(to, c->depth);
    bytes_put_u32(to, c->world);
    bytes_put_u64(to, c->tensors);
    bytes_put_u64(to, c->raw_bytes);
    bytes_put_u64(to, c->stored_bytes);
    wire_put_f64(to, c->load_cost);
    bytes_put_u64(to, c->created_ns);
    wire_put_f64(to, c->metric);
    bytes_put_string(to, c->metric_name);
    metadata_put_ids(to, m->dependencies, m->dependency_count);
    metadata_put_files(to, m->files, m->own_count);
    put_roles(to, m->roles, m->role_count);
    if (names_older) {
        metadata_put_files(to, m->files + m->own_count, m->file_count - m->own_count);
    }
    if (c->suspect) {
        bytes_put_u32(to, c->suspect);
    }
    metadata_end(to, start);
}

static void take_checkpoint(metadata_reader *n, manifest *m) {
    ckd_checkpoint *c = &m->checkpoint;
    reader *in = &n->in;
    c->generation = n->generation;
    c->id = metadata_take_id(n);
    c->parent = wire_id(in);
    c->resumed_from = wire_id(in);
    m->branch_origin = wire_id(in);
    metadata_take_run(n, c->run);
    c->step = metadata_take_step(n);
    c->kind = (ckd_kind)reader_u16(in);
    c->fidelity = (ckd_fidelity)reader_u16(in);
    if (!in->failed && (c->kind < CKD_BASE || c->kind > CKD_LOSSY_BASE || c->fidelity < CKD_EXACT ||
                        c->fidelity > CKD_COARSE)) {
        metadata_fail(n, CKD_E_UNSUPPORTED, "the checkpoint's kind or fidelity is unknown to this version");
    }
    if (!in->failed && (c->fidelity == CKD_EXACT) != !(n->features & METADATA_LOSSY)) {
        metadata_fail(n, CKD_E_CORRUPT, "the checkpoint's fidelity does not match its required features");
    }
    c->lossy_resumes = reader_u32(in);
    c->depth = reader_u32(in);
    c->world = reader_u32(in);
    c->tensors = reader_u64(in);
    c->raw_bytes = reader_u64(in);
    c->stored_bytes = reader_u64(in);
    c->load_cost = wire_f64(in);
    c->created_ns = reader_u64(in);
    c->metric = wire_f64(in);
    reader_string(in, c->metric_name, sizeof(c->metric_name));
}

static void take_roles(metadata_reader *n, manifest *m) {
    m->roles = metadata_take_array(n, &m->role_count, METADATA_ROLE_SIZE, sizeof(*m->roles));
    for (size_t i = 0; i < m->role_count; i++) {
        m->roles[i].role = reader_u32(&n->in);
        m->roles[i].tensors = reader_u64(&n->in);
        m->roles[i].raw_bytes = reader_u64(&n->in);
        m->roles[i].stored_bytes = reader_u64(&n->in);
    }
}

typedef struct file_place {
    ckd_id id;
    size_t at;
} file_place;

static int by_id_and_place(const void *a, const void *b) {
    const file_place *x = a, *y = b;
    int order = memcmp(&x->id, &y->id, sizeof(ckd_id));
    return order ? order : (x->at > y->at) - (x->at < y->at);
}

/* Drops each file that repeats an earlier one in the list. */
static ckd_status drop_repeated(manifest *m, ckd_error *err) {
    file_place *places = malloc((m->file_count + 1) * sizeof(*places));
    bool *repeated = calloc(m->file_count + 1, sizeof(*repeated));
    if (!places || !repeated) {
        free(places);
        free(repeated);
        return err_nomem(err, m->file_count * sizeof(*places), "a manifest's files");
    }
    for (size_t i = 0; i < m->file_count; i++) {
        places[i] = (file_place){m->files[i].id, i};
    }
    qsort(places, m->file_count, sizeof(*places), by_id_and_place);
    for (size_t i = 1; i < m->file_count; i++) {
        repeated[places[i].at] = memcmp(&places[i].id, &places[i - 1].id, sizeof(ckd_id)) == 0;
    }
    size_t kept = 0;
    for (size_t i = 0; i < m->file_count; i++) {
        if (!repeated[i]) {
            m->files[kept++] = m->files[i];
        }
    }
    m->file_count = kept;
    free(places);
    free(repeated);
    return CKD_OK;
}

ckd_status manifest_add_files(manifest *m, const file_ref *files, size_t count, ckd_error *err) {
    file_ref *grown = realloc(m->files, (m->file_count + count + 1) * sizeof(*grown));
    if (!grown) {
        return err_nomem(err, (m->file_count + count) * sizeof(*grown), "a manifest's files");
    }
    m->files = grown;
    if (count) {
        memcpy(m->files + m->file_count, files, count * sizeof(*files));
    }
    m->file_count += count;
    return drop_repeated(m, err);
}

static void take_older(metadata_reader *n, manifest *m) {
    size_t count;
    file_ref *older = metadata_take_files(n, &count);
    if (older && manifest_add_files(m, older, count, n->err) != CKD_OK) {
        n->status = n->status == CKD_OK ? CKD_E_NOMEM : n->status;
        n->in.failed = true;
    } else if (m->file_count != m->own_count + count) {
        metadata_fail(n, CKD_E_CORRUPT, "the manifest names a chunk file twice");
    }
    free(older);
}

static void take_suspect(metadata_reader *n, manifest *m) {
    m->checkpoint.suspect = reader_u32(&n->in);
    if (!n->in.failed && !m->checkpoint.suspect) {
        metadata_fail(n, CKD_E_CORRUPT, "the manifest does not say why its checkpoint is suspect");
    }
}

ckd_status manifest_decode(manifest *out, const ckd_id *store, const void *data, size_t size,
                           const char *path, ckd_error *err) {
    metadata_reader n = metadata_open(METADATA_MANIFEST, store, data, size, path, err);
    *out = (manifest){0};
    take_checkpoint(&n, out);
    out->dependencies = metadata_take_ids(&n, &out->dependency_count);
    out->files = metadata_take_files(&n, &out->file_count);
    out->own_count = out->file_count;
    take_roles(&n, out);
    if (n.features & METADATA_OLDER) {
        take_older(&n, out);
    }
    if (n.features & METADATA_SUSPECT) {
        take_suspect(&n, out);
    }
    out->own_only = out->dependency_count && !(n.features & METADATA_OLDER);
    ckd_status status = metadata_close(&n, NULL, 0);
    if (status != CKD_OK) {
        manifest_free(out);
    }
    return status;
}

void manifest_free(manifest *m) {
    free(m->dependencies);
    free(m->files);
    free(m->roles);
    *m = (manifest){0};
}
