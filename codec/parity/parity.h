/*
 * Parity files, which rebuild lost or damaged chunk files. A group has chunk files (members) and a few parity files
 * (rows). All are cut into pieces of one size. The pieces with the same number form a stripe; each row has one piece
 * per stripe. codec/FORMAT.md, "Parity", is normative.
 */
#ifndef CODEC_PARITY_PARITY_H
#define CODEC_PARITY_PARITY_H

#include "base/file.h"
#include "base/hash.h"
#include "codec/common/common.h"
#include "codec/metadata/metadata.h"

#define PARITY_PIECE     65536u /* writers use this size */
#define PARITY_PIECE_MIN 4096u
#define PARITY_PIECE_MAX (1u << 20)
#define PARITY_FILE_MAX  (UINT64_C(1) << 43) /* bytes per member */
#define PARITY_BEHIND    32u                 /* bytes of a stripe behind its piece and hashes */
#define PARITY_TRAILER   16u

typedef struct parity_member {
    uint32_t column;
    ckd_id file;
    uint64_t size;
    hash128 root; /* as named by a manifest */
} parity_member;

typedef struct parity_group {
    ckd_id id;
    uint32_t rows;  /* parity files in the group */
    uint32_t row;   /* index of this parity file */
    uint32_t piece; /* bytes; the last stripe has fewer */
    uint64_t created_ns;
    size_t member_count;    /* 1 to ERASURE_DATA_MAX */
    parity_member *members; /* one per column, ascending */
} parity_group;
/* The caller checks `to->failed`. */
void parity_group_encode(bytes *to, const ckd_id *store, const parity_group *g);
/*
 * Decodes a group; release it with parity_group_free. Errors: as for every metadata file (codec/metadata/metadata.h).
 */
ckd_status parity_group_decode(parity_group *out, const ckd_id *store, const void *data, size_t size,
                               const char *path, ckd_error *err);

void parity_group_free(parity_group *g); /* frees what g points to */
/* Returns true if the groups agree in everything but the row. */
bool parity_group_same(const parity_group *a, const parity_group *b);

/* ---- layout ---- */
uint64_t parity_stripes(const parity_group *g);
/* Bytes of a row's piece in a stripe: as many as the longest member has there. */
uint32_t parity_piece_size(const parity_group *g, uint64_t stripe);
/* Bytes of a member's data in a stripe, at most a piece; the rest counts as zeros. */
uint32_t parity_member_size(const parity_group *g, size_t member, uint64_t stripe);
/* Bytes of a whole stripe in the file: the piece, the members' hashes, and the stripe's identity. */
uint32_t parity_stripe_size(const parity_group *g, uint64_t stripe);
/* Offset of a stripe behind the first head; for stripe = parity_stripes it is the offset behind the last stripe. */
uint64_t parity_stripe_offset(const parity_group *g, uint64_t stripe);
uint64_t parity_file_size(const parity_group *g);

/* ---- a stripe in memory: its piece, then an 8-byte hash per member, then its identity ---- */
/* Fills in the identity and its checksum. */
void parity_stripe_finish(uint8_t *stripe_data, const parity_group *g, uint32_t row, uint64_t stripe);
/* Returns true if the data is the given stripe of the given row, undamaged. */
bool parity_stripe_valid(const uint8_t *stripe_data, const parity_group *g, uint32_t row, uint64_t stripe);
/* Returns true if a member's data matches its hash in the stripe, which must be valid. */
bool parity_member_valid(const uint8_t *stripe_data, const parity_group *g, size_t member, uint64_t stripe,
                         const void *data);
/* Appends the end of a file, behind the second head. */
void parity_put_trailer(bytes *to, uint32_t head_size);

/* ---- reading ---- */
typedef struct parity_file {
    file_reader *file;
    parity_group group;
    uint32_t head_size;
    bool front_damaged, back_damaged; /* this copy of the head is damaged; never both */
} parity_file;
/*
 * Opens a file by either copy of its head. Damaged stripes or a truncated file are no error here. Errors: CORRUPT (both
 * heads are damaged), UNSUPPORTED, NOT_FOUND, IO, NOMEM.
 */
ckd_status parity_open(parity_file **out, const ckd_id *store, const char *path, ckd_error *err);
void parity_close(parity_file *f); /* accepts NULL */
/* Returns true if the file is long enough to hold the stripe. The sizes in its head may be anything. */
bool parity_has_stripe(const parity_file *f, uint64_t stripe);
/* Reads stripes first ... first + count - 1 back to back, unchecked. Missing bytes read as zeros. Errors: IO. */
ckd_status parity_read(parity_file *f, uint64_t first, uint64_t count, uint8_t *to, ckd_error *err);

#endif
