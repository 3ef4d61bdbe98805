/* Between the files that read a layout's text. Lines are split into words; a word that goes on behind `=` is an option. */
#ifndef CLI_LAYOUT_PARSE_H
#define CLI_LAYOUT_PARSE_H

#include "cli/layout.h"

#define LAYOUT_WORDS 64 /* of a line */

typedef struct layout_parsing {
    layout *l;
    uint32_t line;
    char *words[LAYOUT_WORDS];
    size_t count;
    ckd_error *err;
} layout_parsing;

/* INVALID, at the line that is being read. */
ckd_status layout_wrong(layout_parsing *p, const char *format, ...) CLI_PRINTF(2, 3);

/* Each reads one line. Errors: INVALID, NOMEM. */
ckd_status layout_parse_mesh(layout_parsing *p);
ckd_status layout_parse_files(layout_parsing *p);
ckd_status layout_parse_state(layout_parsing *p);
ckd_status layout_parse_number(layout_parsing *p);
ckd_status layout_parse_rule(layout_parsing *p);

/* Names of axes, numbers and parts: letters, digits, _ and -, a letter first. */
bool layout_is_name(const char *text, size_t length);
/* LAYOUT_AXES if there is none. */
uint32_t layout_find_axis(const layout *l, const char *name, size_t length);
/* "tp,dp" */
ckd_status layout_parse_over(layout_over *out, layout_parsing *p, const char *text);
/* What stands before the next `,` (or another mark): a number. Moves on behind it; false if there is none. */
bool layout_next_number(uint64_t *out, const char **text, char mark);
/* "1,2,3"; free() it. */
ckd_status layout_parse_numbers(uint64_t **out, size_t *count, layout_parsing *p, const char *option,
                                const char *text);
/* One more at the end of an array; NULL, and INVALID or NOMEM in p->err, if there is no room. It is zeroed. */
void *layout_more(layout_parsing *p, void *array, size_t *count, size_t size);

void layout_template_free(layout_template *t);
/* Adds an item; text is copied, length bytes of it. */
ckd_status layout_template_add(layout_template *t, layout_item item, const char *text, size_t length,
                               ckd_error *err);

/* The rule's pattern, and as= if it is not NULL. */
ckd_status layout_compile(layout_parsing *p, layout_rule *rule, const char *as);
void layout_expression_free(layout_expression *e);
void layout_rule_free(layout_rule *rule);

#endif
