/* Names that runs get from other runs: RUN~K for branches, RUN.lost and RUN.lostK for checkpoints that came back. */
#include "engine/common/common.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"

bool branch_root(char root[CKD_RUN_MAX + 1], unsigned *number, const char *run) {
    snprintf(root, CKD_RUN_MAX + 1, "%s", run);
    char *tilde = strrchr(root, '~');
    char *end = NULL;
    unsigned long k = tilde && tilde[1] >= '1' && tilde[1] <= '9' ? strtoul(tilde + 1, &end, 10) : 0;
    if (!tilde || tilde == root || !end || *end || k < 2 || k > 1000000) {
        *number = 1;
        return false;
    }
    *tilde = '\0';
    *number = (unsigned)k;
    return true;
}

ckd_status branch_name(char out[CKD_RUN_MAX + 1], const char *root, unsigned number, ckd_error *err) {
    int n = number < 2 ? snprintf(out, CKD_RUN_MAX + 1, "%s", root)
                       : snprintf(out, CKD_RUN_MAX + 1, "%s~%u", root, number);
    return n > CKD_RUN_MAX
               ? err_set(err, CKD_E_INVALID, "the branch's name '%s~%u' is too long", root, number)
               : CKD_OK;
}

ckd_status returned_name(char out[CKD_RUN_MAX + 1], const char *run, unsigned number, ckd_error *err) {
    int n = number < 2 ? snprintf(out, CKD_RUN_MAX + 1, "%s.lost", run)
                       : snprintf(out, CKD_RUN_MAX + 1, "%s.lost%u", run, number);
    return n > CKD_RUN_MAX ? err_set(err, CKD_E_INVALID, "the name '%s.lost' is too long", run) : CKD_OK;
}

bool is_returned_name(const char *run) {
    const char *dot = strrchr(run, '.'), *word = ".lost";
    if (!dot || dot == run || strncmp(dot, word, strlen(word)) != 0) {
        return false;
    }
    const char *number = dot + strlen(word);
    return !*number || (*number >= '1' && *number <= '9' && strspn(number, "0123456789") == strlen(number));
}
