// Brings the replica set up, with its root user, the roles of roles.js, and a user of each role that has a password.
// Run by mongosh in the network of the first member, so that MongoDB's localhost exception lets it make the first user. Safe to repeat.
//
// Environment: HOSTS, as host:port,host:port; DATABASE; SECRETS, the folder with root_password and <role>_password.

const fs = require("fs");
const path = require("path");
load(path.join(process.env.ROLES ?? "/init", "roles.js"));

const hosts = process.env.HOSTS.split(",");
const database = process.env.DATABASE ?? "mongo_durable";
const folder = process.env.SECRETS ?? "/run/secrets";

function secret(name) {
  const file = path.join(folder, name);
  return fs.existsSync(file) ? fs.readFileSync(file, "utf8").trim() : null;
}

function signIn() {
  try {
    return db.getSiblingDB("admin").auth("root", secret("root_password")).ok === 1;
  } catch (error) {
    if (error.codeName === "AuthenticationFailed") return false;
    throw error;
  }
}

if (!signIn()) {
  // The first member is preferred, so that the users can be made from here.
  const members = hosts.map((host, number) => ({ _id: number, host, priority: number === 0 ? 2 : 1 }));
  try {
    rs.initiate({ _id: "rs0", members });
  } catch (error) {
    if (error.codeName !== "AlreadyInitialized") throw error;
  }
  while (!db.hello().isWritablePrimary) sleep(200);
  db.getSiblingDB("admin").createUser({ user: "root", pwd: secret("root_password"), roles: ["root"] });
}

const root = encodeURIComponent(secret("root_password"));
const primary = new Mongo(`mongodb://root:${root}@${hosts.join(",")}/?replicaSet=rs0&authSource=admin`).getDB(database);
const existing = primary.runCommand({ rolesInfo: 1 }).roles.map((each) => each.role);
for (const each of mongoDurableRoles(database)) {
  if (existing.includes(each.role)) primary.updateRole(each.role, { privileges: each.privileges, roles: each.roles });
  else primary.createRole(each);
  const password = secret(`${each.role}_password`);
  if (password === null) continue;
  if (primary.getUser(each.role) === null) primary.createUser({ user: each.role, pwd: password, roles: [each.role] });
  else primary.updateUser(each.role, { pwd: password, roles: [each.role] });
}
print(`replica set rs0, database ${database}: roles and users are there`);
