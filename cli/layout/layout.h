/*
 * A layout: how someone else's ranks hold a model. docs/layouts.md describes the text; this is what it becomes.
 *
 *   layout_parse      text -> layout                         (parse.c, head.c, rule.c, pattern.c)
 *   layout_bind       a tensor's name -> rules that match it (names.c)
 *   layout_other_name the rank's name <-> the checkpoint's
 *   layout_share_make which elements a rank holds, in which order (share.c)
 *   layout_buffer_make the parameters of a flat buffer, and layout_ranges_make which elements of each a rank has in it (flat.c reads
 *                     what is said about them, buffer.c)
 *
 * Import asks what a rank's tensor becomes, load asks what a rank is to hold; both by the same arithmetic, and import checks that load
 * would find the way back. Nothing here opens files but layout_read. A layout never changes once made.
 */
#ifndef CLI_LAYOUT_H
#define CLI_LAYOUT_H

#include <regex.h>

#include "cli/output/errors.h"

#define LAYOUT_AXES     8
#define LAYOUT_NAME     32 /* bytes of the name of an axis or a number, with NUL */
#define LAYOUT_NUMBERS  4  /* different ones in a pattern */
#define LAYOUT_CAPTURES 24 /* parentheses and numbers of a pattern */
#define LAYOUT_CUTS     4
#define LAYOUT_TEXT_MAX (1u << 20)
#define LAYOUT_NONE     SIZE_MAX

/* ---- what it consists of ---- */

typedef struct layout_axis {
    char name[LAYOUT_NAME];
    uint32_t size;
} layout_axis;

/* Some axes, slowest first. A place is a combination of their coordinates: 0 ... places - 1. */
typedef struct layout_over {
    uint8_t axes[LAYOUT_AXES];
    uint8_t count; /* 0: none */
    uint32_t places;
} layout_over;

/* Numbers in names (of layers, of experts): which of them ranks at each place have. */
typedef struct layout_number {
    char name[LAYOUT_NAME];
    uint32_t line;
    layout_over over;
    uint64_t *
        numbers; /* in the checkpoint's names: of place 0, then of place 1, ..., in the order of the ranks' own */
    size_t *begin; /* of each place; places + 1 of them */
    bool global;   /* ranks' names have the same numbers; else each counts from 0 */
} layout_number;

/* Names of tensors that belong to a parameter: `before`*`after`, on both sides. */
typedef struct layout_state {
    char *local_before, *local_after, *global_before, *global_after;
} layout_state;

/* Part of a template: of the path of a rank's file, or of a name. */
typedef enum layout_item_kind {
    LAYOUT_TEXT,
    LAYOUT_AXIS,
    LAYOUT_RANK,
    LAYOUT_GROUP,
    LAYOUT_NUMBER,
    LAYOUT_PART
} layout_item_kind;
typedef struct layout_item {
    layout_item_kind kind;
    uint32_t index; /* of the axis, the number in the rule, or what the group has captured */
    uint32_t width; /* digits at least, of axes and ranks */
    char *text;
} layout_item;
typedef struct layout_template {
    layout_item *items;
    size_t count;
} layout_template;

/* How a path of a rank's file ends. */
typedef struct layout_path {
    layout_template end;
    bool fixed[LAYOUT_AXES]; /* only ranks with this coordinate have such a file; the path does not say it */
    uint32_t at[LAYOUT_AXES];
} layout_path;

typedef enum layout_cut_kind {
    LAYOUT_EVEN,
    LAYOUT_CHUNK,
    LAYOUT_REPEAT, /* as even; fewer units than places: each is on several neighbours */
    LAYOUT_SIZES
} layout_cut_kind;

/* One dimension, cut over some axes. */
typedef struct layout_cut {
    int32_t dim; /* negative: from the last one, which is -1 */
    layout_over over;
    layout_cut_kind kind;
    uint64_t *sizes; /* LAYOUT_SIZES: of each place */
    uint64_t unit;   /* elements that stay together; at least 1 */
} layout_cut;

typedef struct layout_part {
    char *name;
    uint64_t size; /* 0: all parts have the same */
    uint64_t unit;
    bool kind_given; /* else it is the cut's */
    layout_cut_kind kind;
} layout_part;

typedef enum layout_kind {
    LAYOUT_UNIQUE,
    LAYOUT_REPLICATED,
    LAYOUT_AVERAGED,
    LAYOUT_SHARDED,
    LAYOUT_EXPERT,
    LAYOUT_SKIPPED,
    LAYOUT_FLAT /* no tensor of the checkpoint: many of the rank's, end to end */
} layout_kind;

/* A parameter in a list: the rank's name for it, without what a state adds, and perhaps the shape of all of it. */
typedef struct layout_member {
    layout_template name; /* numbers are the line's */
    bool shaped;
    uint32_t ndim;
    uint64_t shape[CKD_MAX_DIMS];
} layout_member;

/* A line of a list: its parameters in turn, once for each combination of the numbers that the buffer's own name does not say. */
typedef struct layout_list_line {
    uint32_t line;
    uint8_t *only[LAYOUT_AXES]; /* as a rule's */
    uint32_t numbers[LAYOUT_NUMBERS], number_count;
    layout_member *members;
    size_t count;
} layout_list_line;

typedef struct layout_list {
    char name[LAYOUT_NAME];
    layout_list_line *lines;
    size_t count;
} layout_list;

/* How the parameters of a list lie in a flat buffer, and what each place has of that. */
typedef struct layout_flat {
    size_t list;
    layout_over over;
    uint64_t pad, pad_all, align; /* elements: of a place, of all places, between beginnings of parameters */
    bool each;                    /* every parameter is padded and cut on its own */
    bool stripped;                /* padding at the end is not there */
    bool of_itself, of_states;    /* what has the buffer: the parameters, their states */
    char *states;                 /* if not all of them: "exp_avg.*,master.*" */
} layout_flat;

/* A regular expression on names, and where its parentheses are. */
typedef struct layout_expression {
    regex_t regex;
    bool compiled;
    uint32_t captures;                  /* in all */
    uint32_t of_number[LAYOUT_NUMBERS]; /* first capture that has the number; 0: none */
    uint32_t
        number_captures[LAYOUT_CAPTURES + 1]; /* 1 + the number that this one captures; 0: something else */
    uint32_t of_axis[LAYOUT_AXES + 1];        /* what has the coordinate, or, at the end, the rank; 0: none */
    uint32_t of_part;                         /* 0: none */
} layout_expression;

typedef struct layout_rule {
    uint32_t line;
    char *pattern;
    layout_kind kind;
    bool take_first; /* copies are not compared */
    layout_cut cuts[LAYOUT_CUTS];
    uint32_t cut_count;
    uint32_t main_cut; /* the one that has parts or padding */
    bool padded;
    bool repeats; /* the main cut, or a part, is LAYOUT_REPEAT */
    uint64_t size,
        pad; /* elements without padding and repetition, 0: not said; a place's share is a multiple of pad */
    layout_part *parts;
    size_t part_count;
    uint64_t groups;            /* parts stand side by side in each of so many; 0: once for each rank */
    uint8_t *only[LAYOUT_AXES]; /* NULL: all coordinates; else 1 for those at which ranks hold it */
    layout_over numbered;       /* axes that numbers in the name decide about */
    uint32_t number_count;
    uint32_t numbers[LAYOUT_NUMBERS];        /* the layout's */
    layout_expression local, global;         /* global: only with as= */
    bool renamed, apart;                     /* names are made by templates; as= has {part} */
    layout_template local_name, global_name; /* only with as=; local_name of LAYOUT_FLAT, too */
    layout_flat flat;                        /* only of LAYOUT_FLAT */
} layout_rule;

typedef struct layout {
    char *path; /* for messages */
    layout_axis axes[LAYOUT_AXES];
    uint32_t axis_count, world;
    layout_path *files;
    size_t file_count;
    layout_state *states;
    size_t state_count;
    layout_number *numbers;
    size_t number_count;
    layout_list *lists;
    size_t list_count;
    layout_rule *rules;
    size_t rule_count;
} layout;

/* ---- reading ---- */

/* Errors: INVALID, with file and line; NOT_FOUND, IO; NOMEM. Release with layout_release. */
ckd_status layout_read(layout **out, const char *path, ckd_error *err);
ckd_status layout_parse(layout **out, const char *text, size_t size, const char *path, ckd_error *err);
void layout_release(layout *l); /* accepts NULL */

/* "FILE:LINE: what". line 0: of the whole file. */
ckd_status layout_error(const layout *l, uint32_t line, ckd_error *err, ckd_status status, const char *format,
                        ...) CLI_PRINTF(5, 6);

/* ---- ranks ---- */

typedef struct layout_text {
    char text[192];
} layout_text;

void layout_coordinates(uint32_t at[LAYOUT_AXES], const layout *l, uint32_t rank);
uint32_t layout_rank(const layout *l, const uint32_t at[LAYOUT_AXES]);
uint32_t layout_place(const layout_over *over, const layout *l, const uint32_t at[LAYOUT_AXES]);
/* "rank 3 (pp=0 tp=3)" */
layout_text layout_rank_text(const layout *l, uint32_t rank);
/* "[3, 4]" */
layout_text layout_shape_text(uint32_t ndim, const uint64_t *shape);
/* The rank whose file this is, by the `files` lines; LAYOUT_NONE if none fits, or it says a rank that there is not. */
size_t layout_rank_of_path(const layout *l, const char *path);
/* The path of a rank's file, below some folder; the first `files` line, or rank00000.safetensors. free() it. NULL: no memory. */
char *layout_path_of_rank(const layout *l, uint32_t rank);

/* ---- names ---- */

/* A name that a rule matches. */
typedef struct layout_binding {
    const layout_rule *rule;
    size_t state;                     /* whose parameter the rule is about; LAYOUT_NONE: the name itself is */
    char *name;                       /* without what the state adds */
    bool global;                      /* the name is the checkpoint's, not the rank's */
    uint64_t numbers[LAYOUT_NUMBERS]; /* in the name */
    uint64_t coordinates[LAYOUT_AXES + 1]; /* in a checkpoint's name; UINT64_MAX: it has none */
    size_t part; /* of a checkpoint's name; LAYOUT_NONE: parts are kept together, or there are none */
    regoff_t begin[LAYOUT_CAPTURES + 1], end[LAYOUT_CAPTURES + 1]; /* of what was captured; -1: nothing */
} layout_binding;

typedef struct layout_bindings {
    layout_binding *items; /* in the order of the rules */
    size_t count;
} layout_bindings;

/* All rules that match the name of a rank's tensor, or of a checkpoint's. Errors: NOMEM. */
ckd_status layout_bind(layout_bindings *out, const layout *l, const char *name, bool global, ckd_error *err);
void layout_bindings_free(layout_bindings *b);
/* Does the rule apply to this rank? Then `numbers` are those of the other side. */
bool layout_applies(uint64_t numbers[LAYOUT_NUMBERS], const layout *l, const layout_binding *b,
                    const uint32_t at[LAYOUT_AXES]);
/* The first that does; NULL if none. */
const layout_binding *layout_choose(uint64_t numbers[LAYOUT_NUMBERS], const layout *l,
                                    const layout_bindings *b, const uint32_t at[LAYOUT_AXES]);
/* The name on the other side, of or for this rank. part: of parts that are stored apart. free() it. Errors: NOMEM. */
ckd_status layout_other_name(char **out, const layout *l, const layout_binding *b,
                             const uint32_t at[LAYOUT_AXES], const uint64_t numbers[LAYOUT_NUMBERS],
                             size_t part, ckd_error *err);

/* ---- elements ---- */

/* Elements that stand side by side in a rank's tensor, along one dimension. */
typedef struct layout_stretch {
    size_t part;     /* LAYOUT_NONE: padding */
    uint64_t offset; /* in the checkpoint's tensor */
    uint64_t length;
    uint32_t copy,
        copies; /* which of how many that ranks of different places have; 0 of 1 but for LAYOUT_REPEAT */
} layout_stretch;

typedef struct layout_share {
    uint32_t ndim, dim; /* dim: of the stretches */
    uint64_t offsets[CKD_MAX_DIMS],
        lengths[CKD_MAX_DIMS]; /* offsets: but for dim; lengths: the rank's shape */
    layout_stretch *stretches;
    size_t count;
} layout_share;

/* Parts that have tensors of their own: 1 if they are kept together. */
size_t layout_tensors_of(const layout_rule *rule);
/* The dimension along which stretches lie; 0 if nothing is cut, CKD_MAX_DIMS if tensors of so many have none such. */
uint32_t layout_main_dim(const layout_rule *rule, uint32_t ndim);
/*
 * What a rank holds of tensors of this shape. totals: of each of layout_tensors_of, along the main dimension; that of `shape` is not
 * looked at. Errors: MISMATCH (it cannot be cut so; the message says why, with file and line), NOMEM. Release with layout_share_free.
 */
ckd_status layout_share_make(layout_share *out, const layout *l, const layout_rule *rule,
                             const uint32_t at[LAYOUT_AXES], uint32_t ndim, const uint64_t *shape,
                             const uint64_t *totals, ckd_error *err);
void layout_share_free(layout_share *share);
/* The shape of a rank's tensor, given that of all of it, without padding and repetition; parts side by side. Errors: as above. */
ckd_status layout_rank_shape(uint64_t lengths[CKD_MAX_DIMS], const layout *l, const layout_rule *rule,
                             const uint32_t at[LAYOUT_AXES], uint32_t ndim, const uint64_t *shape,
                             ckd_error *err);

/* ---- flat buffers ---- */

typedef struct layout_parameter {
    char *name, *plain; /* the rank's, with what the state adds, and without */
    const layout_member *member;
    uint32_t line; /* of the list */
} layout_parameter;

/* One that a rank has, if it has its parameters. */
typedef struct layout_buffer {
    const layout_rule *rule;
    size_t state; /* whose buffer it is; LAYOUT_NONE: the parameters' own */
    char *name;   /* the rank's */
    layout_parameter *parameters;
    size_t count;
} layout_buffer;

/* numbers: of the rule's pattern, as the rank's names have them. Errors: MISMATCH (too many parameters), NOMEM. Release with
 * layout_buffer_free, also after a failure. */
ckd_status layout_buffer_make(layout_buffer *out, const layout *l, const layout_rule *rule, size_t state,
                              const uint64_t numbers[LAYOUT_NUMBERS], const uint32_t at[LAYOUT_AXES],
                              ckd_error *err);
void layout_buffer_free(layout_buffer *b);
/* Calls for all that the rank may have. Errors: as above, those of the call. */
typedef ckd_status (*layout_buffer_fn)(void *context, const layout_buffer *b, ckd_error *err);
ckd_status layout_each_buffer(const layout *l, const uint32_t at[LAYOUT_AXES], layout_buffer_fn call,
                              void *context, ckd_error *err);
/* MISMATCH if the parameter's own rule decides about ranks along which the buffer is cut. */
ckd_status layout_check_parameter(const layout *l, const layout_rule *flat, const layout_rule *own,
                                  const layout_parameter *p, ckd_error *err);

/* Elements first ... first + count - 1 of a tensor's row-major order, which begin at `at` in what has them. */
typedef struct layout_range {
    uint64_t first, count, at;
} layout_range;
/* What a rank has of parameters of these numbers of elements; *length: of its buffer, with padding. Errors: MISMATCH. */
ckd_status layout_ranges_make(layout_range *out, uint64_t *length, const layout *l, const layout_rule *flat,
                              const uint32_t at[LAYOUT_AXES], const uint64_t *sizes, size_t count,
                              ckd_error *err);
/*
 * The largest box of a tensor that begins with its element `first`, and has the next ones, in order, at most `count`, which are there.
 * Returns how many elements it has. A scalar's has one, of lengths[0].
 */
uint64_t layout_next_box(ckd_region *out, uint32_t ndim, const uint64_t *shape, uint64_t first,
                         uint64_t count);

#endif
