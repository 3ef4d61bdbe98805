/* Who may connect: whoever has the secret. It travels as it is, so the network must be trusted. */
#include "peers/peers.h"

#include <errno.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"

ckd_status peer_secret_read(peer_secret *out, const char *path, ckd_error *err) {
    struct stat about;
    bytes text = {.size = 0};
    *out = (peer_secret){.size = 0};
    if (stat(path, &about) != 0) {
        return err_sys(err, errno, path, "cannot read the secret of the agents");
    }
    if ((about.st_mode & 077) != 0 || about.st_uid != geteuid()) {
        return err_set(err, CKD_E_READ_ONLY,
                       "others may read the secret in %s: it must be this user's, with mode 0600 (chmod 600)",
                       path);
    }
    ckd_status status = file_read_all(&text, path, PEER_SECRET_MAX + 2, err);
    while (status == CKD_OK && text.size > 0 &&
           (text.data[text.size - 1] == '\n' || text.data[text.size - 1] == '\r')) {
        text.size--;
    }
    if (status == CKD_OK && (text.size < PEER_SECRET_MIN || text.size > PEER_SECRET_MAX)) {
        status = err_set(err, CKD_E_INVALID, "the secret in %s has %zu bytes: it must have %d to %d", path,
                         text.size, PEER_SECRET_MIN, PEER_SECRET_MAX);
    }
    if (status == CKD_OK) {
        memcpy(out->data, text.data, text.size);
        out->size = text.size;
    }
    bytes_free(&text);
    return status;
}

bool peer_secret_equal(const peer_secret *a, const void *data, size_t size) {
    const uint8_t *b = data;
    unsigned different = a->size != size;
    for (size_t i = 0; i < a->size; i++) {
        different |= (unsigned)(a->data[i] ^ (size ? b[i % size] : 0));
    }
    return a->size > 0 && !different;
}
