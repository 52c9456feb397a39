// What the kernel must know about the process it runs in.
#pragma once

namespace host {
bool forked();  // are we in the child of a fork()?
}
